"""Epilogues of products: the reference, and the kernels against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import Kernel
from quantkit.cuda.device import gpu_of
from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bcq.instances import SOURCES
from quantkit.ops.bcq.launch import product
from quantkit.ops.bcq.op import BcqLinearPrepared, bcq_linear_with_epilogue
from quantkit.ops.bcq.order import Order
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from tests.ops.bcq.cases import random_weight

CUDA = torch.device("cuda")
EPILOGUE_KERNELS = (Kernel.BCQ_BINARY_GEMV, Kernel.BCQ_LUT_GEMV)  # of one token, with an epilogue of their own
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]
FUNCTION_RTOL = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two units: another tanh or exp, rounded step by step
SHAPES = [(1, 1000, 1536), (3, 257, 1000), (1, 50, 24700)]  # M, N, K; N in parts of tiles
SHAPE_IDS = ["one token", "three tokens", "split rows"]


KERNELS = [
    *((kernel, Order.PLANES) for kernel in SOURCES if kernel != Kernel.BCQ_LEVEL_GEMV),
    *((kernel, Order.CODES) for kernel in (Kernel.BCQ_LEVEL_GEMV, Kernel.BCQ_GEMM_MMA, Kernel.BCQ_GEMM_WGMMA)),
]


def problem(
    shape: tuple[int, int, int], dtype: torch.dtype, order: Order = Order.PLANES
) -> tuple[Tensor, tuple[Tensor | object, ...], Tensor]:
    """x [M, K], (weight [N, K], bias) as product takes them, residual, for a shape (M, N, K)."""
    m, n, k = shape
    weight = random_weight(3, n, k, 128, offset=True).to(CUDA).tiled(order)
    x, residual = torch.randn(m, k, device=CUDA).to(dtype), torch.randn(m, n, device=CUDA).to(dtype)
    torch.cuda.synchronize()
    return x, (weight, torch.randn(n, device=CUDA).to(dtype)), residual


@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_the_reference_rounds_every_step(dtype: torch.dtype) -> None:
    """Against fp64 with a rounding behind each step; a single rounding at the end gives other bits for some numbers."""
    y, residual = torch.randn(20, 40).to(dtype), torch.randn(20, 40).to(dtype)
    function = y.double() / (1 + (-y.double()).exp())
    stepwise = (residual.double() + function.to(dtype).double()).to(dtype)
    assert torch.equal(apply_epilogue(y, Epilogue("silu", residual)), stepwise)
    assert not torch.equal((residual.double() + function).to(dtype), stepwise)


def test_without_a_part_the_epilogue_is_the_other() -> None:
    y, residual = torch.tensor([[-2.0, 3.0]]), torch.tensor([[10.0, 20.0]])
    assert apply_epilogue(y, NO_EPILOGUE).tolist() == [[-2.0, 3.0]]
    assert apply_epilogue(y, Epilogue("relu")).tolist() == [[0.0, 3.0]]
    assert apply_epilogue(y, Epilogue(residual=residual)).tolist() == [[8.0, 23.0]]
    assert apply_epilogue(y, Epilogue("relu", residual)).tolist() == [[10.0, 23.0]]


def test_the_cpu_applies_it_to_the_reference_product() -> None:
    weight, x = random_weight(2, 40, 328, 64, offset=True).tiled(), torch.randn(1, 1, 328)
    bias, residual = torch.randn(40), torch.randn(1, 1, 40)
    op = BcqLinearPrepared(x, weight.tiles, weight.scale_tiles, bias, 40, 64)
    plain = bcq_linear_with_epilogue(op, NO_EPILOGUE)
    assert torch.equal(bcq_linear_with_epilogue(op, Epilogue("relu", residual)), residual + plain.relu())


@pytest.mark.parametrize(
    "residual", [torch.zeros(1, 24).half(), torch.zeros(1, 25)], ids=["another size", "another type"]
)
def test_a_residual_of_another_kind_is_refused(residual: Tensor) -> None:
    with pytest.raises(KernelError, match="cannot be added"):
        Epilogue(residual=residual).addend(torch.zeros(1, 25).half())


@pytest.mark.parametrize(
    "other", [{"activation": "gelu"}, {"residual": torch.zeros(1, 8)}], ids=["function", "residual"]
)
def test_a_gated_product_has_nothing_else_behind_it(other: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match="gated"):
        Epilogue(gated=True, **other)


@pytest.mark.cuda
@pytest.mark.parametrize(("kernel", "order"), KERNELS)
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_IDS)
def test_kernels_have_the_epilogue_to_the_bit(
    shape: tuple[int, int, int], dtype: torch.dtype, kernel: Kernel, order: Order
) -> None:
    if kernel not in gpu_of(CUDA).architecture.kernels:
        pytest.skip("a kernel of other generations")
    x, rest, residual = problem(shape, dtype, order)
    plain = product(kernel, x, *rest, weights_ready=True)
    for epilogue in (Epilogue("relu"), Epilogue(residual=residual), Epilogue("relu", residual)):
        expected = apply_epilogue(plain, epilogue)
        assert torch.equal(product(kernel, x, *rest, weights_ready=True, epilogue=epilogue), expected)
        assert torch.equal(product(kernel, x, *rest, weights_ready=True, epilogue=epilogue), expected)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_every_function_is_applied(dtype: torch.dtype, activation: str) -> None:
    x, rest, residual = problem((1, 400, 512), dtype)
    plain = product(EPILOGUE_KERNELS[0], x, *rest)
    expected = apply_epilogue(plain, Epilogue(activation, residual)).double()
    for kernel in EPILOGUE_KERNELS:
        got = product(kernel, x, *rest, epilogue=Epilogue(activation, residual)).double()
        assert (got - expected).norm() < FUNCTION_RTOL[dtype] * expected.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", EPILOGUE_KERNELS)
def test_bad_values_pass_through(kernel: str) -> None:
    x, rest, residual = problem((1, 400, 512), torch.float16)
    residual[0, 7] = float("inf")
    assert product(kernel, x, *rest, epilogue=Epilogue("relu", residual)).isinf().nonzero().tolist() == [[0, 7]]
    x[0, 100] = float("nan")
    assert product(kernel, x, *rest, epilogue=Epilogue("relu", residual)).isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", EPILOGUE_KERNELS)
def test_a_chain_of_overlapping_products_replays(kernel: str) -> None:
    first, second = (random_weight(4, 1024, 1024, 128, offset=True).to(CUDA).tiled() for _ in range(2))
    x = torch.randn(1, 1024, device=CUDA).half()
    torch.cuda.synchronize()

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            between = product(kernel, x, first, None, weights_ready=True, epilogue=Epilogue("relu"))
            x = product(kernel, between * 0.01, second, None, weights_ready=True, epilogue=Epilogue(residual=x))
            x = product(kernel, x, second, None, weights_ready=True, epilogue=Epilogue(residual=x)) * 0.1
        return x

    chain(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(3):
        x.copy_(torch.randn(1, 1024))
        graph.replay()
        got = y.clone()
        assert got.isfinite().all()
        assert torch.equal(got, chain(x))
