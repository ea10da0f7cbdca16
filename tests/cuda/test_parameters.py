"""Reading a kernel's parameters from its source, and comparing a launch's arguments with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantkit.cuda.architectures import ARCHITECTURES
from quantkit.cuda.parameters import Parameter, check_arguments, global_functions, kernel_parameters
from quantkit.cuda.source import KernelSource
from quantkit.cuda.tensor_map import TensorMap
from quantkit.errors import KernelError
from quantkit.ops.instances import all_units

CPU = torch.device("cpu")
SOURCE = """
// __global__ void commented(int a);
/* __global__ void also(int a); */
struct Pair { int a, b; };
template <int kBits, bool kWide>
__global__ void __launch_bounds__(kThreads * (kBits + 1), kWide ? 2 : 1)
    product(const uint8* __restrict__ x, const float* __restrict__ scales,  // [M], of (many) things
            const typename Stored<kBits, kWide>::Type* weights,
            uint16 *y, void* __restrict__ z, long long const* place,
            int M, uint32 magic,
            float step, const __grid_constant__ TensorMap map) {
    body(x, 1);
}
__global__ void __launch_bounds__(32) empty() {}
extern "C" __global__ __launch_bounds__(64) void bare(int* p) { *p = 1; }
"""
PRODUCT = (
    Parameter("x", "uint8", True),
    Parameter("scales", "float", True),
    Parameter("weights", "Stored<kBits, kWide>::Type", True),
    Parameter("y", "uint16", True),
    Parameter("z", "void", True),
    Parameter("place", "long long", True),
    Parameter("M", "int", False),
    Parameter("magic", "uint32", False),
    Parameter("step", "float", False),
    Parameter("map", "TensorMap", False),
)


def arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "x": torch.zeros(3, dtype=torch.int8),
        "scales": torch.zeros(3),
        "weights": torch.zeros(3, dtype=torch.uint8),
        "y": torch.zeros(3, dtype=torch.bfloat16),
        "z": None,
        "place": torch.zeros(1, dtype=torch.int64),
        "M": 3,
        "magic": 2**32 - 1,
        "step": 0.5,
        "map": TensorMap(torch.zeros(4, 8).half(), 8, 8),
    }
    return {name: value for name, value in {**given, **changes}.items() if value != "absent"}


def test_parameters_are_read_in_order_with_their_types() -> None:
    found = global_functions(SOURCE)
    assert list(found) == ["product", "empty", "bare"]
    assert found["product"] == PRODUCT
    assert found["empty"] == ()
    assert found["bare"] == (Parameter("p", "int", True),)


@pytest.mark.parametrize("text", ["__global__ void f(int a", "__global__ int;", "__global__ void f(int) {}"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(KernelError, match="cannot be read"):
        global_functions(text)


def test_every_shipped_kernel_can_be_launched() -> None:
    """All __global__ functions are instances of some generation, with parameters of types that launches pass."""
    units = {unit for row in ARCHITECTURES.values() for unit in all_units(row)}
    launched = {(unit.source.file, unit.function) for unit in units}
    for source in {unit.source for unit in units}:
        for function in global_functions(source.text):
            assert (source.file, function) in launched
            assert kernel_parameters(source, function)


def test_an_unknown_function_or_type_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelSource, "text", "__global__ void f(double a) {}")
    with pytest.raises(KernelError, match=r"x\.cu: no __global__ function g"):
        kernel_parameters(KernelSource("x.cu", {}), "g")
    with pytest.raises(KernelError, match="f takes a as double"):
        kernel_parameters(KernelSource("x.cu", {}), "f")


def test_the_right_arguments_pass() -> None:
    check_arguments("product", PRODUCT, arguments(), CPU)
    check_arguments("product", PRODUCT, arguments(M=True, step=2, scales=None, map=None), CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": "absent"}, "no argument for scales"),
        ({"m": 3}, "no parameter m"),
        ({"M": 3.0}, r"M is int, and got 3\.0"),
        ({"M": 2**31}, "M is int, and got 2147483648"),
        ({"magic": -1}, "magic is uint32, and got -1"),
        ({"step": True}, "step is float, and got True"),
        ({"map": torch.zeros(4, 8)}, "map is TensorMap, and got a torch.float32 tensor"),
        ({"map": TensorMap(torch.zeros(4, 8, device="meta"), 8, 8)}, "map is on meta"),
        ({"x": 7}, r"x is uint8\*, and got 7"),
        ({"scales": torch.zeros(3).half()}, r"scales is float\*, and got a torch.float16 tensor"),
        ({"y": torch.zeros(3)}, r"y is uint16\*, and got a torch.float32 tensor"),
        ({"x": torch.zeros(3, device="meta")}, "x is on meta, and the kernel runs on cpu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=f"kernel product: {message}"):
        check_arguments("product", PRODUCT, arguments(**changes), CPU)
