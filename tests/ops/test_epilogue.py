"""What a product's last step may do besides: the reference, and the kernels against it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bcq.launch import BINARY, KERNELS, LUT, product
from quantkit.ops.bcq.op import bcq_finished
from quantkit.ops.epilogue import AS_IT_IS, Finish, finished
from tests.ops.bcq.cases import random_weight

CUDA = torch.device("cuda")
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]
FUNCTION_RTOL = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # two units: another tanh or exp, rounded step by step
SHAPES = [(1, 1000, 1536), (3, 257, 1000), (1, 50, 24700)]  # tokens, rows, columns; rows in parts of tiles
SHAPE_IDS = ["one token", "three tokens", "split rows"]


def problem(
    tokens: int, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor | object, ...], Tensor]:
    """x, (weight, bias) as product takes them, residual."""
    weight = random_weight(3, rows, columns, 128, offset=True).to(CUDA).tiled()
    x, residual = torch.randn(tokens, columns, device=CUDA).to(dtype), torch.randn(tokens, rows, device=CUDA).to(dtype)
    torch.cuda.synchronize()
    return x, (weight, torch.randn(rows, device=CUDA).to(dtype)), residual


@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_the_reference_rounds_every_step(dtype: torch.dtype) -> None:
    y, residual = torch.randn(2, 40).to(dtype), torch.randn(2, 40).to(dtype)
    assert finished(y, AS_IT_IS) is y
    assert torch.equal(finished(y, Finish("silu", residual)), residual + torch.nn.functional.silu(y))


def test_the_cpu_finishes_the_reference_product() -> None:
    weight, x = random_weight(2, 40, 328, 64, offset=True).tiled(), torch.randn(1, 1, 328)
    bias, residual = torch.randn(40), torch.randn(1, 1, 40)
    plain = bcq_finished(x, weight, bias, AS_IT_IS)
    assert torch.equal(bcq_finished(x, weight, bias, Finish("relu", residual)), residual + plain.relu())


@pytest.mark.parametrize(
    "residual", [torch.zeros(1, 24).half(), torch.zeros(1, 25)], ids=["another size", "another type"]
)
def test_a_residual_of_another_kind_is_refused(residual: Tensor) -> None:
    with pytest.raises(KernelError, match="cannot be added"):
        Finish(residual=residual).addend(torch.zeros(1, 25).half())


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES, ids=SHAPE_IDS)
def test_kernels_finish_to_the_bit(tokens: int, rows: int, columns: int, dtype: torch.dtype, kernel: str) -> None:
    x, rest, residual = problem(tokens, rows, columns, dtype)
    plain = product(kernel, x, *rest, settled=True)
    for finish in (Finish("relu"), Finish(residual=residual), Finish("relu", residual)):
        expected = finished(plain, finish)
        assert torch.equal(product(kernel, x, *rest, settled=True, finish=finish), expected)
        assert torch.equal(product(kernel, x, *rest, settled=True, finish=finish), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_every_function_is_applied(dtype: torch.dtype, activation: str) -> None:
    x, rest, residual = problem(1, 400, 512, dtype)
    plain = product(BINARY, x, *rest)
    expected = finished(plain, Finish(activation, residual)).double()
    for kernel in (BINARY, LUT):
        got = product(kernel, x, *rest, finish=Finish(activation, residual)).double()
        assert (got - expected).norm() < FUNCTION_RTOL[dtype] * expected.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [BINARY, LUT])
def test_bad_values_pass_through(kernel: str) -> None:
    x, rest, residual = problem(1, 400, 512, torch.float16)
    residual[0, 7] = float("inf")
    assert product(kernel, x, *rest, finish=Finish("relu", residual)).isinf().nonzero().tolist() == [[0, 7]]
    x[0, 100] = float("nan")
    assert product(kernel, x, *rest, finish=Finish("relu", residual)).isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", [BINARY, LUT])
def test_a_chain_of_overlapping_products_replays(kernel: str) -> None:
    first, second = (random_weight(4, 1024, 1024, 128, offset=True).to(CUDA).tiled() for _ in range(2))
    x = torch.randn(1, 1024, device=CUDA).half()
    torch.cuda.synchronize()

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            between = product(kernel, x, first, None, settled=True, finish=Finish("relu"))
            x = product(kernel, between * 0.01, second, None, settled=True, finish=Finish(residual=x))
            x = product(kernel, x, second, None, settled=True, finish=Finish(residual=x)) * 0.1
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
