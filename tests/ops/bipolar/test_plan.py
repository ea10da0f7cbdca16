"""Which bipolar kernel and tile multiply a pair of widths, and that instances fit."""

from __future__ import annotations

import re

import pytest

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel, architecture
from quantkit.formats.bipolar import BipolarSpec
from quantkit.ops.bipolar.instances import WgmmaTile, binary_pairs, wgmma_tiles, wgmma_unit
from quantkit.ops.bipolar.plan import GEMV_LIMIT, best_tile, kernel_for, path_for, path_table
from quantkit.ops.bipolar.weight import takes_tiles

PAIRS = [(p, q) for p in range(1, 9) for q in range(1, 9)]
TILES = [tile for p, q in binary_pairs() for tile in wgmma_tiles(p, q, False)] + wgmma_tiles(1, 1, True)
ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
AMPERE, HOPPER, BLACKWELL = architecture(8, 0), architecture(9, 0), architecture(12, 0)
LONG = 1 << 20


@pytest.mark.parametrize("row", ROWS)
def test_the_path_table_names_every_pair_once(row: Architecture) -> None:
    """What ``quantkit doctor`` prints is what path_for decides."""
    found = {}
    for widths, what, reason in path_table(row):
        assert reason
        ends = re.fullmatch(r"W(\d)A(\d)(?:-(\d))?", widths)
        if ends is not None:
            p, first, last = map(int, ends.groups(default=widths[-1]))
            found.update({(p, q): what for q in range(first, last + 1)})
    assert found.keys() == set(PAIRS)
    for pair, what in found.items():
        path = path_for(*pair, row)
        assert what == (path.binary or path.int8)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("weight_bits", "act_bits"), PAIRS, ids=[f"w{p}a{q}" for p, q in PAIRS])
def test_only_kernels_of_the_gpu_are_taken(weight_bits: int, act_bits: int, row: Architecture) -> None:
    for tokens in (1, 1000):
        for in_features in (64, 4096, LONG):
            assert kernel_for(weight_bits, act_bits, (tokens, in_features), row) in row.kernels


def test_paths_by_widths_length_and_gpu() -> None:
    assert path_for(2, 4, HOPPER).longest == (1 << 22) // 45
    assert path_for(2, 4, HOPPER).kernel((1 << 22) // 45) is Kernel.BIPOLAR_BINARY_WGMMA
    assert path_for(2, 4, HOPPER).kernel((1 << 22) // 45 + 1) is Kernel.BIPOLAR_INT8_WGMMA
    assert path_for(3, 4, HOPPER).binary is None
    assert [path_for(1, 1, row).kernel(64) for row in (AMPERE, HOPPER, BLACKWELL)] == [
        Kernel.BIPOLAR_BINARY_MMA,
        Kernel.BIPOLAR_BINARY_WGMMA,
        Kernel.BIPOLAR_INT8_MMA,
    ]


def test_few_tokens_take_the_gemv_where_binary_products_are_native() -> None:
    few, more = GEMV_LIMIT // 8, GEMV_LIMIT // 8 + 1
    assert kernel_for(8, 8, (few, 4096), AMPERE) is Kernel.BIPOLAR_GEMV
    assert kernel_for(8, 8, (more, 4096), AMPERE) is Kernel.BIPOLAR_INT8_MMA
    assert kernel_for(1, 8, (few, 4096), HOPPER) is Kernel.BIPOLAR_GEMV
    assert kernel_for(8, 8, (few, 4096), BLACKWELL) is Kernel.BIPOLAR_INT8_MMA


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (BipolarSpec(4, 8, 128, scale_bits=8), True),
        (BipolarSpec(6, 1, 256, scale_bits=8), True),
        (BipolarSpec(4, 8, 4096, scale_bits=8), True),  # one group
        (BipolarSpec(4, 8, scale_bits=8), True),
        (BipolarSpec(4, 8), True),
        (BipolarSpec(4, 8, 64, scale_bits=8), False),  # a line has two scales
        (BipolarSpec(4, 16, 128, scale_bits=8), False),
        (BipolarSpec(4, 8, 128), False),  # scales of 16 bits
        (BipolarSpec(4, 16), False),
    ],
    ids=str,
)
def test_which_weights_the_products_of_integers_take(spec: BipolarSpec, taken: bool) -> None:
    assert takes_tiles(spec.act_bits, spec.group_size, 4096, coded=spec.coded) is taken


def test_scale_codes_take_products_of_bytes() -> None:
    assert kernel_for(2, 2, (1000, 4096), HOPPER) is Kernel.BIPOLAR_BINARY_WGMMA
    assert kernel_for(2, 2, (1000, 4096), HOPPER, coded=True) is Kernel.BIPOLAR_FUSED_WGMMA
    assert kernel_for(2, 2, (1000, 4096), AMPERE, coded=True) is Kernel.BIPOLAR_INT8_MMA
    assert kernel_for(2, 2, (4, 4096), AMPERE, coded=True) is Kernel.BIPOLAR_GEMV


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_fits_shared_memory_with_two_stages(tile: WgmmaTile) -> None:
    for dtype, element_bytes in ((0, 2), (2, 4)):
        assert tile.stages(element_bytes) >= 2
        assert wgmma_unit(tile, dtype).shared_mem <= HOPPER.shared_limit()


def test_small_problems_take_small_tiles() -> None:
    large = best_tile(1, 1, False, (8192, 8192), 132)
    small = best_tile(1, 1, False, (128, 4096), 132)
    assert small.rows_a * small.rows_b < large.rows_a * large.rows_b
