"""The fused product of numbers (kernels/bcq/gemm_numbers.cuh). racecheck leaves it out: tests/ops/test_sanitizer.py."""

from __future__ import annotations

import pytest
import torch

from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.ops.bcq.gemm import GemmProblem, gemm_layouts
from quantkit.ops.bcq.gemm_launch import gemm, gemm_problem
from quantkit.ops.bcq.instances import GEMM_NUMBER_TOKENS
from quantkit.ops.bcq.order import GRID_PLANES, Order
from quantkit.ops.bcq.product import Product
from tests.ops.bcq.cases import random_weight
from tests.ops.bcq.test_op import RTOL, TYPE_IDS, TYPES, reference, relative_error

CUDA = torch.device("cuda")
HOPPER = ARCHITECTURES[9, 0]


@pytest.mark.parametrize("segments", [1, 2, 4])
@pytest.mark.parametrize("bits", GRID_PLANES)
@pytest.mark.parametrize("order", [Order.CODES, Order.GRID])
@pytest.mark.parametrize("row", [HOPPER, ARCHITECTURES[8, 0]], ids=["Hopper", "Ampere"])
def test_numbers_are_multiplied_where_groups_are_wide_and_tokens_few(
    row: Architecture, order: Order, bits: int, segments: int
) -> None:
    it = GemmProblem(bits, order.scales(bits) + 1, 16, segments, 256, 16, 40, Gpu(row, 132), order)
    chosen = {layout.shape.tokens for layout in gemm_layouts(it) if it.multiplies_numbers(layout.shape)}
    ours = row == HOPPER and order == Order.GRID and segments <= 2
    assert chosen == ({GEMM_NUMBER_TOKENS} if ours else set())  # no tile of fewer would read the weight once


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("group_size", [128, 384, 256, -1])
@pytest.mark.parametrize(("tokens", "offset"), [(3, True), (17, False), (30, True), (32, True)])
@pytest.mark.parametrize("bits", GRID_PLANES)
def test_every_layout_of_numbers_on_odd_shapes(
    bits: int, tokens: int, offset: bool, group_size: int, dtype: torch.dtype
) -> None:
    gpu, k = gpu_of(CUDA), 777 if group_size > 0 else 768
    weight = random_weight(bits, 130, k, group_size, offset=offset, equal_steps=True)
    x, tiles = torch.randn(tokens, k, device=CUDA).to(dtype), weight.to(CUDA).tiled(Order.GRID)
    it = gemm_problem(tiles, tokens, gpu)
    layouts = [layout for layout in gemm_layouts(it) if it.multiplies_numbers(layout.shape)]
    if not layouts:
        pytest.skip("this GPU multiplies levels")
    for layout in layouts:
        y = gemm(Product.of(x, tiles, None), layout)
        assert relative_error(y, reference(weight, x, None)) < RTOL[dtype], layout
        assert torch.equal(gemm(Product.of(x, tiles, None), layout), y), layout
