"""Queueing a kernel, on a driver that is simulated: what it reads of a launch, and what a wrong launch does."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit.cuda import driver, launch
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import gpu_of
from quantkit.cuda.driver import LaunchShape, LoadedKernel
from quantkit.cuda.launch import FixedLaunches, Launch, check_kernels, queue_fixed
from quantkit.cuda.parameters import Argument, Parameter, Within
from quantkit.cuda.source import KernelSource
from quantkit.cuda.tensor_map import MAP_BYTES, TensorMap
from quantkit.errors import KernelError

CPU = torch.device("cpu")
HANDLE, STREAM = 4711, 42
SOURCE = "__global__ void f(const float* x, int count, uint32 magic, float step, uint8* y, float last) {}"
PARAMETERS = (
    Parameter("x", "float", True),
    Parameter("count", "int", False),
    Parameter("magic", "uint32", False),
    Parameter("step", "float", False),
    Parameter("y", "uint8", True),
    Parameter("last", "float", False),
)
TYPES = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p, ctypes.c_float)


class Driver:
    """Takes launches as the driver does: it reads values through the pointers while the call lasts."""

    def __init__(self) -> None:
        self.values: list[tuple[object, ...]] = []
        self.configs: list[dict[str, object]] = []
        self.code = 0

    def cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: None) -> int:
        assert (function, extra) == (HANDLE, None)
        read = driver._Config.from_address(config)
        attributes = {read.attributes[i].id: tuple(read.attributes[i].value[:3]) for i in range(read.attribute_count)}
        self.configs.append(
            {
                "grid": (read.grid_x, read.grid_y, read.grid_z),
                "block": (read.block_x, read.block_y, read.block_z),
                "shared_mem": read.shared_mem,
                "stream": read.stream,
                "attributes": attributes,
            }
        )
        places = (ctypes.c_void_p * len(TYPES)).from_address(pointers)
        self.values.append(tuple(kind.from_address(at).value for kind, at in zip(TYPES, places, strict=True)))
        return self.code


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver, "_library", lambda: made)
    return made


@pytest.fixture
def given(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Launch]:
    """Makes launches of one kernel that is loaded already."""
    loaded = LoadedKernel(SimpleNamespace(ptr=HANDLE), PARAMETERS)
    monkeypatch.setattr(KernelSource, "text", SOURCE)
    monkeypatch.setattr(launch, "_load", lambda unit, device: (loaded, True))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    unit = CompileUnit(KernelSource("f.cu", {}), "f", shared_mem=64)

    def make(overlap: bool = False, cluster: int = 1, shared_mem: int | None = None, **changes: Argument) -> Launch:
        args = {"last": 1.5, "y": None, "x": torch.zeros(2), "count": -7, "magic": 2**32 - 1, "step": 3, **changes}
        return Launch(
            unit, CPU, grid=(5, 2), block=96, args=args, shared_mem=shared_mem, overlap=overlap, cluster=cluster
        )

    return make


def test_arguments_are_put_in_the_kernels_order(machine: Driver, given: Callable[..., Launch]) -> None:
    x, y = torch.zeros(2), torch.zeros(4, dtype=torch.uint8)
    given(x=x).run()
    given(x=x, y=y, count=9).run()
    given(x=Within(y, 1), y=Within(y, 3)).run()
    assert machine.values == [
        (x.data_ptr(), -7, 2**32 - 1, 3.0, None, 1.5),
        (x.data_ptr(), 9, 2**32 - 1, 3.0, y.data_ptr(), 1.5),
        (y.data_ptr() + 1, -7, 2**32 - 1, 3.0, y.data_ptr() + 3, 1.5),
    ]


def test_a_tensor_map_is_passed_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, bytes, int]] = []
    types = (ctypes.c_int32, ctypes.c_char * MAP_BYTES, ctypes.c_int32)

    def take(config: int, function: int, pointers: int, extra: None) -> int:
        places = (ctypes.c_void_p * len(types))(*(ctypes.c_void_p * len(types)).from_address(pointers))
        first, given, last = (kind.from_address(at) for kind, at in zip(types, places, strict=True))
        read.append((first.value, bytes(given), last.value))
        return 0

    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=take))
    monkeypatch.setattr(TensorMap, "encoded", lambda self: bytes(range(MAP_BYTES)))
    names = (("first", "int"), ("x", "TensorMap"), ("last", "int"))
    kernel = LoadedKernel(SimpleNamespace(ptr=HANDLE), tuple(Parameter(*name, False) for name in names))
    shape = LaunchShape((1,), 32, 0, overlap=False, cluster=1)
    given = {"first": 3, "x": TensorMap(torch.zeros(2, 8), 8, 8), "last": 4}
    kernel.queue(given, shape, STREAM)
    kernel.queue({**given, "x": None}, shape, STREAM)
    kernel.queue_fixed(kernel.fixed(given, shape, ("x",)), (), bytes(reversed(range(MAP_BYTES))), STREAM)
    encoded = bytes(range(MAP_BYTES))
    assert read == [(3, encoded, 4), (3, bytes(MAP_BYTES), 4), (3, encoded[::-1], 4)]


def test_a_fixed_launch_takes_other_pointers_and_nothing_else(machine: Driver, given: Callable[..., Launch]) -> None:
    x, y = torch.zeros(2), torch.zeros(4, dtype=torch.uint8)
    fixed = given(x=x, overlap=True).fixed("y", "x")
    given(count=9).run()  # what the thread queued before does not show
    queue_fixed(fixed, CPU, (y.data_ptr(), x.data_ptr() + 4))
    queue_fixed(fixed, CPU, (0, x.data_ptr()))
    assert machine.values[1:] == [
        (x.data_ptr() + 4, -7, 2**32 - 1, 3.0, y.data_ptr(), 1.5),
        (x.data_ptr(), -7, 2**32 - 1, 3.0, None, 1.5),
    ]
    assert machine.configs[1] == machine.configs[2]
    assert machine.configs[1] == {
        **machine.configs[0],
        "attributes": {driver._PROGRAMMATIC_STREAM_SERIALIZATION: (1, 0, 0)},
    }


def test_fixed_launches_are_made_once_a_key(machine: Driver, given: Callable[..., Launch]) -> None:
    kept, made = FixedLaunches(), []

    def make() -> Launch:
        made.append(given())
        return made[-1]

    tensors = [torch.zeros(2) for _ in range(3)]
    for number, x in zip((1, 1, 2), tensors, strict=True):
        kept.run(("a", number), make, CPU, {"x": x, "y": None})
    assert len(made) == 2
    assert [values[0] for values in machine.values] == [x.data_ptr() for x in tensors]


def test_sizes_stream_and_attributes_reach_the_driver(machine: Driver, given: Callable[..., Launch]) -> None:
    given().run()
    given(overlap=True, cluster=2, shared_mem=4096).run()
    given(overlap=True).run()
    expected = {"grid": (5, 2, 1), "block": (96, 1, 1), "shared_mem": 64, "stream": STREAM, "attributes": {}}
    assert machine.configs[0] == expected
    early = {driver._PROGRAMMATIC_STREAM_SERIALIZATION: (1, 0, 0)}
    pair = {driver._CLUSTER_DIMENSION: (2, 1, 1)}
    assert machine.configs[1] == {**expected, "shared_mem": 4096, "attributes": {**pair, **early}}
    assert machine.configs[2] == {**expected, "attributes": early}


def test_the_first_launch_is_checked(machine: Driver, given: Callable[..., Launch]) -> None:
    with pytest.raises(KernelError, match=r"kernel f: x is float\*, and got a torch.float16 tensor"):
        given(x=torch.zeros(2).half()).run()
    assert not machine.values


@pytest.mark.parametrize("changes", [{"extra": 1}, {"count": "seven"}, {"count": 2**31}], ids=["name", "kind", "range"])
def test_later_launches_do_not_reach_the_driver_with_wrong_arguments(
    machine: Driver, given: Callable[..., Launch], changes: dict[str, Argument]
) -> None:
    given().run()
    with pytest.raises(KernelError, match=r"extra|wrong kind"):
        given(**changes).run()
    renamed = given()
    renamed.args["Count"] = renamed.args.pop("count")  # type: ignore[index, attr-defined]
    with pytest.raises(KernelError, match=r"missing argument.*count"):
        renamed.run()
    assert len(machine.values) == 1


def test_the_drivers_error_is_one_line(machine: Driver, given: Callable[..., Launch]) -> None:
    machine.code = 700
    with pytest.raises(KernelError, match="CUDA driver error 700"):
        given().run()


def test_threads_do_not_mix_their_arguments(machine: Driver, given: Callable[..., Launch]) -> None:
    """The driver reads values while the interpreter runs other threads: each has its own."""
    given().run()
    plain, at_once, several = Driver.cuLaunchKernelEx, threading.Barrier(2, timeout=20), range(50)

    def slow(self: Driver, *call: int) -> int:
        at_once.wait()
        return plain(self, *call)

    machine.cuLaunchKernelEx = slow.__get__(machine)  # type: ignore[method-assign]

    def work(first: int) -> None:
        for i in several:
            given(count=first + i).run()

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = sorted(values[1] for values in machine.values[1:])
    assert counts == [*several, *(1000 + i for i in several)]


class Cupy:
    """CuPy with two devices, whose current one is not torch's; it says where kernels were loaded and changed."""

    def __init__(self) -> None:
        self.current, self.used = 0, []  # type: ignore[var-annotated]
        self.cuda = SimpleNamespace(Device=self.device, runtime=SimpleNamespace(getDeviceProperties=self.properties))

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def properties(self, index: int) -> dict[str, int]:
        return {"sharedMemPerBlockOptin": 100 + index}

    def RawModule(self, path: str) -> Cupy:
        self.used.append(self.current)
        return self

    def get_function(self, symbol: str) -> Cupy:
        return self

    shared_size_bytes = 4

    @property
    def kernel(self) -> SimpleNamespace:
        self.used.append(self.current)
        return SimpleNamespace(ptr=HANDLE + self.current)


def test_a_kernel_is_loaded_on_the_gpu_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, unit = Cupy(), CompileUnit(KernelSource("f.cu", {}), "f")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(KernelSource, "text", SOURCE)
    monkeypatch.setattr(launch, "cached_cubin", lambda unit, row: (Path("f.cubin"), "f"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    try:
        handles = [launch._load(unit, index)[0].function.ptr for index in (1, 0)]
    finally:
        launch._load.cache_clear()
    assert (handles, cupy.used, cupy.current) == ([HANDLE + 1, HANDLE], [1, 1, 0, 0], 0)


def test_a_gpu_that_no_kernel_runs_on_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setitem(sys.modules, "cupy", None)
    check_kernels(CPU)
    with pytest.raises(KernelError, match="CUDA kernels need CuPy, which is not installed: pip install"):
        check_kernels(torch.device("cuda", 5))
    monkeypatch.setitem(sys.modules, "cupy", Cupy())
    check_kernels(torch.device("cuda", 5))
    properties.major = 7
    gpu_of.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"compute capability"):
            check_kernels(torch.device("cuda", 5))
    finally:
        gpu_of.cache_clear()
