"""Launching compiled units on torch's current stream, through CuPy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.cuda.compile import CompileUnit, cached_cubin, cupy_install_line, target
from quantkit.cuda.device import OVERLAP_CAPABILITY, compute_capability
from quantkit.cuda.driver import Value, launch_with_attributes
from quantkit.errors import KernelError

DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""Element types as kernels/shared/common.cuh numbers them."""

Argument = Tensor | int | float | None
"""Tensor or None: a pointer (null for None). int: a 32-bit signed integer. float: fp32."""


@dataclass(frozen=True)
class _Stream:
    """What CuPy's launcher reads of a stream."""

    ptr: int


@cache
def _load(unit: CompileUnit, device: int) -> Any:
    """The unit's function on a device, allowed all the dynamic shared memory that a block can have there.

    Raises KernelError where CuPy is missing, the unit does not compile, or a CUDA graph is being captured: loading a
    module is not allowed then, so every shape must have run once before.
    """
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(f"kernel {unit.expression} first used inside a CUDA graph capture; run the model once before")
    try:
        import cupy
    except ImportError as error:
        major = int((torch.version.cuda or "13").split(".")[0])
        raise KernelError(f"CUDA kernels need CuPy, which is not installed: {cupy_install_line(major)}") from error
    cubin, symbol = cached_cubin(unit, target(*torch.cuda.get_device_capability(device), unit.hopper))
    kernel = cupy.RawModule(path=str(cubin)).get_function(symbol)
    most = cupy.cuda.runtime.getDeviceProperties(device)["sharedMemPerBlockOptin"]
    kernel.max_dynamic_shared_size_bytes = most - kernel.shared_size_bytes
    return kernel.kernel  # the loaded function itself: no lookup per launch


def _argument(value: Argument) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    return np.int32(value) if isinstance(value, int) else np.float32(value)


def _value(value: Argument) -> Value:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    return ctypes.c_int32(value) if isinstance(value, int) else ctypes.c_float(value)


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def launch(
    unit: CompileUnit,
    device: torch.device,
    *,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple[Argument, ...],
    shared_mem: int = 0,
    overlap: bool = False,
    cluster: int = 1,
) -> None:
    """Queue one kernel on the current stream of ``device``; returns at once.

    args: in the kernel's order, see Argument. shared_mem: bytes of dynamic shared memory per block.
    overlap: programmatic dependent launch where the GPU has it, see launch_with_attributes for what that demands.
    cluster: blocks along x that see each other's shared memory; more than one from compute capability 9.0 on.
    The first launch of an instance on a device compiles and loads it, so it must come before graph capture.
    Raises KernelError, see _load.
    """
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        function = _load(unit, index)
        stream = torch.cuda.current_stream().cuda_stream
        overlap = overlap and compute_capability(torch.device("cuda", index)) >= OVERLAP_CAPABILITY
        if overlap or cluster > 1:
            launch_with_attributes(
                function.ptr,
                stream,
                grid=_three(grid),
                block=_three(block),
                values=tuple(map(_value, args)),
                shared_mem=shared_mem,
                overlap=overlap,
                cluster=cluster,
            )
        else:
            function(grid, block, tuple(map(_argument, args)), shared_mem, _Stream(stream))
