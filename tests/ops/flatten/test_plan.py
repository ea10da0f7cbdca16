"""Which kernel and tile multiply integer codes, and that instances fit."""

from __future__ import annotations

import pytest

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel, architecture
from quantkit.ops.flatten.instances import GEMM_TILES, GemmTile, wgmma_unit
from quantkit.ops.flatten.plan import best_tile, multiplies_int4, plan_quantize, product_kernel

ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]


@pytest.mark.parametrize("row", ROWS)
def test_every_gpu_has_a_product_kernel_of_its_own(row: Architecture) -> None:
    assert product_kernel(row) in row.kernels


def test_warpgroup_products_and_int4_by_gpu() -> None:
    assert product_kernel(architecture(9, 0)) is Kernel.INT8_GEMM_WGMMA
    assert [multiplies_int4(architecture(*cc)) for cc in ((8, 0), (8, 6), (9, 0), (12, 0))] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("tile", GEMM_TILES, ids=str)
def test_every_tile_fits_shared_memory_with_four_stages(tile: GemmTile) -> None:
    assert tile.stages >= 4
    assert wgmma_unit(tile, 0, True).shared_mem <= architecture(9, 0).shared_limit()


def test_small_problems_take_small_tiles() -> None:
    assert best_tile((16384, 5120), 40, 132) == GEMM_TILES[0]
    assert best_tile((1, 5120), 40, 132) == GEMM_TILES[-1]


@pytest.mark.parametrize("row", ROWS)
def test_tokens_are_staged_where_one_fits(row: Architecture) -> None:
    limit = row.shared_limit()
    for row_bytes in (1, 40, 5120, 20000, limit, limit + 1, 1 << 20):
        made = plan_quantize(row_bytes, row)
        assert made.staged == (row_bytes <= limit)
        assert made.shared_mem <= limit
        assert made.shared_mem >= made.tokens * row_bytes or not made.staged
    assert plan_quantize(40, row).tokens > plan_quantize(limit, row).tokens == 1
