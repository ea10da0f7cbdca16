"""The product that turns planes into codes in registers: every tile and layout against the reference, and the plan."""

from __future__ import annotations

from math import ceil

import pytest
import torch

from quantkit.cuda.architectures import Kernel, architecture
from quantkit.cuda.device import gpu_of
from quantkit.ops.bipolar.fused import (
    TOKEN_TILES,
    FusedTile,
    fused_layouts,
    fused_tiles,
    plan_fused,
)
from quantkit.ops.bipolar.instances import codings
from quantkit.ops.bipolar.plan import GEMV_LIMIT, GEMV_LIMIT_BEFORE_FUSED, fused_limit, kernel_for
from tests.ops.bipolar.problem import Problem, hopper_only, run

HOPPER = architecture(9, 0)
PROCESSORS = 132
TILES = [
    pytest.param(
        tile,
        id=f"w{bits}-{tile.tokens}-{tile.warpgroups}{'-coded' * coded}",
        marks=pytest.mark.sanitize if (bits, tile.tokens) in ((3, 256), (4, 32), (8, 64)) else (),
    )
    for bits in range(1, 9)
    for coded in codings(bits)
    for tile in fused_tiles(bits, coded)
]
CUDA = torch.device("cuda")
SHAPES = [(1, 5, 40), (7, 65, 1030), (65, 130, 264), (130, 257, 2050), (300, 520, 4096)]
# M, N, K of models' layers, of odd sizes, and small ones.
PLANNED = [(1, 4096, 4096), (16, 12288, 12288), (33, 4096, 14336), (300, 28672, 4096), (4096, 4096, 11008), (5, 7, 40)]


@pytest.mark.cuda
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_and_layout_equals_the_reference(tile: FusedTile) -> None:
    hopper_only()
    for i, shape in enumerate(SHAPES):
        dtype = (torch.float16, torch.bfloat16, torch.float32)[i % 3]
        problem = Problem(shape, tile.weight_bits, 8, dtype, zero=i % 2 == 1, coded=tile.coded)
        product, expected = problem.product(True, expanded=False), problem.expected()
        for plan in fused_layouts(tile, shape, gpu_of(CUDA).processors):
            for _ in range(2):
                assert torch.equal(run(product, plan).cpu(), expected), f"{plan=}"


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("weight_bits", "tokens", "coded"), [(4, 256, False), (2, 64, False), (8, 128, False), (4, 128, True)], ids=str
)
def test_blocks_of_several_items_equal_each_other(weight_bits: int, tokens: int, coded: bool) -> None:
    """Whole items in rounds, then shared ones; weights in few rows, and in many."""
    hopper_only()
    problem = Problem((1500, 6104, 2100), weight_bits, 8, torch.float16, coded=coded)
    product = problem.product(True, expanded=False)
    results = [
        run(product, plan)
        for tile in fused_tiles(weight_bits, coded)
        if tile.tokens in (32, tokens)
        for plan in fused_layouts(tile, (1500, 6104, 2100), gpu_of(CUDA).processors)
    ]
    assert all(torch.equal(results[0], result) for result in results[1:])
    assert torch.equal(results[0].cpu(), problem.expected())


@pytest.mark.parametrize("tile", TILES)
def test_every_tile_has_a_slot_to_spare_and_two_stages(tile: FusedTile) -> None:
    assert tile.slots > tile.warpgroups
    assert tile.stages >= 2


@pytest.mark.parametrize("shape", PLANNED, ids=str)
@pytest.mark.parametrize("weight_bits", [1, 4, 8], ids="w{}".format)
def test_a_plan_covers_y_and_gives_every_block_work(weight_bits: int, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    plan = plan_fused(weight_bits, shape, PROCESSORS)
    assert plan.row_tiles * plan.tile.rows >= n > (plan.row_tiles - 1) * plan.tile.rows
    assert plan.token_tiles * plan.tile.tokens >= m > (plan.token_tiles - 1) * plan.tile.tokens
    assert plan.blocks <= PROCESSORS
    assert plan.whole_items % plan.blocks == 0 or not plan.shared_items
    assert plan.stretches == ceil(k / 1024)
    if plan.shared_items:
        assert plan.blocks <= plan.shared_items * plan.stretches
        # A share is at most one item long, so it is of two at most: what _SHARED_ITEMS has room for.
        assert ceil(plan.shared_items * plan.stretches / plan.blocks) <= plan.stretches


def test_few_tokens_take_few_columns() -> None:
    assert plan_fused(4, (16, 12288, 12288), PROCESSORS).tile.tokens == TOKEN_TILES[0]
    assert plan_fused(4, (4096, 12288, 12288), PROCESSORS).tile.tokens == TOKEN_TILES[-1]


def test_k_is_split_where_a_weight_has_few_rows_for_the_processors() -> None:
    few, many = (plan_fused(4, (16, rows, 4096), PROCESSORS) for rows in (4096, 28672))
    assert few.splits == 2
    assert few.blocks == 2 * few.row_tiles * few.token_tiles <= PROCESSORS
    assert many.splits == 1


def test_weights_are_expanded_for_many_tokens_those_of_many_planes_sooner() -> None:
    assert fused_limit(5) > fused_limit(6)
    for bits in (4, 8):
        limit = fused_limit(bits)
        assert kernel_for(bits, 8, (limit, 4096), HOPPER) is Kernel.BIPOLAR_FUSED_WGMMA
        assert kernel_for(bits, 8, (limit + 1, 4096), HOPPER) is Kernel.BIPOLAR_INT8_WGMMA
        assert kernel_for(bits, 8, (limit, 4096), architecture(8, 0)) is Kernel.BIPOLAR_INT8_MMA


def test_the_gemv_ends_sooner_where_the_fused_product_follows() -> None:
    few = GEMV_LIMIT_BEFORE_FUSED // 8
    assert kernel_for(4, 8, (few, 4096), HOPPER) is Kernel.BIPOLAR_GEMV
    assert kernel_for(4, 8, (few + 1, 4096), HOPPER) is Kernel.BIPOLAR_FUSED_WGMMA
    assert kernel_for(4, 8, (GEMV_LIMIT // 8, 4096), architecture(8, 0)) is Kernel.BIPOLAR_GEMV
