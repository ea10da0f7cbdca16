"""A kernel's launch as data, and running it on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from quantkit.cuda.architectures import architecture
from quantkit.cuda.compile import CompileUnit, cached_cubin, cupy_install_line
from quantkit.cuda.device import gpu_of, raw_stream
from quantkit.cuda.driver import FixedLaunch, LaunchShape, LoadedKernel
from quantkit.cuda.parameters import Argument, Pointer, check_arguments, kernel_parameters
from quantkit.errors import KernelError

DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Element types as kernels number them: FLOAT16, BFLOAT16 and FLOAT32 of their constants."""
MOST_FIXED = 1 << 14
"""Launches of a kind that are kept: layers of a model times numbers of tokens that a server meets."""


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """One kernel with everything that it is queued with.

    device: where it runs and its tensors are. grid: blocks. block: threads. args: by the names of the kernel's
    parameters, see Argument. shared_mem: bytes of dynamic shared memory per block; None: those of the unit.
    overlap: programmatic dependent launch where the GPU has it, see LaunchShape for what that demands.
    cluster: blocks along x that see each other's shared memory; more than one where the architecture has clusters.
    """

    unit: CompileUnit
    device: torch.device
    grid: tuple[int, ...]
    block: int
    args: Mapping[str, Argument]
    shared_mem: int | None = None
    overlap: bool = False
    cluster: int = 1

    def check(self) -> None:
        """Raise KernelError where the arguments are not those of the kernel's source. Needs no GPU."""
        parameters = kernel_parameters(self.unit.source, self.unit.function)
        check_arguments(self.unit.expression, parameters, self.args, self.device)

    def run(self) -> None:
        """Queue the kernel on the device's current stream; returns at once.

        The first launch of an instance on a device checks its arguments, compiles and loads it, so it must come before
        graph capture. Raises KernelError, see check and _load.
        """
        index = torch.cuda.current_device()
        if self.device.index in (None, index):
            self._queue(index)
        else:
            with torch.cuda.device(self.device):
                self._queue(self.device.index)

    def _queue(self, index: int) -> None:
        """The same on the current device, of this number."""
        kernel, shape = self._loaded(index)
        kernel.queue(self.args, shape, raw_stream(index))

    def fixed(self, *open_names: str) -> FixedLaunch:
        """The same to be queued again with other tensors and maps of these names, on its own device.

        Raises KernelError, see run.
        """
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        with torch.cuda.device(index):
            kernel, shape = self._loaded(index)
            return kernel.fixed(self.args, shape, open_names)

    def _loaded(self, index: int) -> tuple[LoadedKernel, LaunchShape]:
        kernel, overlaps = _load(self.unit, index)
        if len(self.args) != len(kernel.parameters) or not kernel.checked:
            self.check()
            kernel.checked = True
        shared_mem = self.unit.shared_mem if self.shared_mem is None else self.shared_mem
        return kernel, LaunchShape(self.grid, self.block, shared_mem, self.overlap and overlaps, self.cluster)


class FixedLaunches:
    """Launches that come again and again, by all that they depend on but addresses; they are made once and kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[object, ...], FixedLaunch] = {}

    def run(
        self,
        key: tuple[object, ...],
        make: Callable[[], Launch],
        device: torch.device,
        pointers: Mapping[str, Pointer | None],
    ) -> None:
        """Queue the launch of a key on a device. make: gives it where it is new. pointers: all of the kernel's."""
        key = (device, *key)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= MOST_FIXED:
                self._kept.clear()
            found = self._kept[key] = make().fixed(*pointers)
        queue_fixed(found, device, [0 if it is None else it.data_ptr() for it in pointers.values()])


def queue_fixed(launch: FixedLaunch, device: torch.device, words: Sequence[int], encoded: bytes = b"") -> None:
    """Queue a fixed launch on the current stream of its device, see LoadedKernel.queue_fixed."""
    index = torch.cuda.current_device()
    if device.index in (None, index):
        launch.kernel.queue_fixed(launch, words, encoded, raw_stream(index))
    else:
        with torch.cuda.device(device):
            launch.kernel.queue_fixed(launch, words, encoded, raw_stream(device.index))


def check_kernels(device: torch.device) -> None:
    """Before work that runs kernels where it is on a GPU: whether they can.

    Raises KernelError for a GPU below compute capability 8.0, and where CuPy is missing.
    """
    if device.type == "cuda":
        gpu_of(device)
        _cupy()


def _cupy() -> Any:
    """CuPy. Raises KernelError with the pip line where it is missing."""
    try:
        import cupy
    except ImportError as error:
        major = int((torch.version.cuda or "13").split(".")[0])
        raise KernelError(f"CUDA kernels need CuPy, which is not installed: {cupy_install_line(major)}") from error
    return cupy


@cache
def _load(unit: CompileUnit, device: int) -> tuple[LoadedKernel, bool]:
    """The unit on a device, allowed all the dynamic shared memory that a block can have, and whether launches overlap.

    Raises KernelError where CuPy is missing, the unit does not compile, or a CUDA graph is being captured: loading a
    module is not allowed then, so every shape must have run once before.
    """
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(f"kernel {unit.expression} first used inside a CUDA graph capture; run the model once before")
    cupy = _cupy()
    row = architecture(*torch.cuda.get_device_capability(device))
    cubin, symbol = cached_cubin(unit, row)
    with cupy.cuda.Device(device):  # CuPy loads, and keeps modules, by its own current device and not by torch's
        function = cupy.RawModule(path=str(cubin)).get_function(symbol)
        most = cupy.cuda.runtime.getDeviceProperties(device)["sharedMemPerBlockOptin"]
        function.max_dynamic_shared_size_bytes = most - function.shared_size_bytes
        loaded = LoadedKernel(function.kernel, kernel_parameters(unit.source, unit.function))
    return loaded, row.overlap
