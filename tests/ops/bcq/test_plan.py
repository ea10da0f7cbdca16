"""The bcq GEMVs' launch plans: they fit, cover everything, and follow what was measured."""

from __future__ import annotations

from math import ceil

import pytest

from quantkit.cuda.device import Gpu, shared_limit
from quantkit.ops.bcq.instances import SEGMENTS, GemvCase, GemvTile, bcq_units, gemv_case
from quantkit.ops.bcq.plan import plan_gemv
from quantkit.ops.instances import COMPILED_CAPABILITIES

PROCESSORS = 100
LONGEST_TURN = 4  # k tiles; planes cover whole turns
IDS = [f"sm_{major}{minor}" for major, minor in COMPILED_CAPABILITIES]
H200 = Gpu((9, 0), 132)


@pytest.mark.parametrize("capability", COMPILED_CAPABILITIES, ids=IDS)
@pytest.mark.parametrize(
    ("row_tiles", "k_tiles"), [(1, 1), (256, 16), (768, 48), (448, 112), (8016, 32)], ids=lambda count: str(count)
)
def test_every_plan_fits_its_gpu_and_covers_the_row(row_tiles: int, k_tiles: int, capability: tuple[int, int]) -> None:
    known = set(bcq_units(*capability))
    for bits in range(1, 9):
        for segment in SEGMENTS:
            for tokens, int8 in [(1, False), (2, False), (8, False), (1, True), (2, True), (3, True), (8, True)]:
                case = gemv_case(bits, segment, 16 if segment > 64 else 8, tokens, int8=int8)
                gpu = Gpu(capability, PROCESSORS)
                plan = plan_gemv(case, entries=bits + 1, tile_counts=(row_tiles, k_tiles), gpu=gpu)
                assert plan.shared_mem <= shared_limit(*capability)
                assert 1 <= plan.pass_tiles < k_tiles + LONGEST_TURN
                assert plan.blocks >= min(row_tiles, PROCESSORS - plan.cluster)
                assert ceil(row_tiles / (plan.blocks // plan.cluster)) <= ceil(row_tiles / (PROCESSORS // plan.cluster))
                assert plan.unit in known  # compiled, without spills, by the tests


def test_long_rows_are_split_where_there_are_clusters() -> None:
    case, sizes = GemvCase(4, 128, 16, 1), {"entries": 5, "tile_counts": (448, 111)}
    split = plan_gemv(case, gpu=H200, **sizes)
    assert (split.cluster, split.blocks, split.pass_tiles) == (2, 130, 56)
    assert plan_gemv(case, gpu=Gpu((8, 0), 132), **sizes).cluster == 1
    assert plan_gemv(case, gpu=H200, entries=5, tile_counts=(448, 28)).cluster == 1
    pairs = GemvTile(12, 1, 2, cluster=2)
    assert plan_gemv(GemvCase(4, 128, 16, 1), gpu=H200, entries=5, tile_counts=(448, 28), tile=pairs).cluster == 2


def test_one_multiprocessor_is_left_to_small_kernels_where_that_is_free() -> None:
    def blocks(row_tiles: int, capability: tuple[int, int] = (9, 0), tokens: int = 1) -> int:
        case, gpu = GemvCase(4, 128, 16, tokens), Gpu(capability, 132)
        return plan_gemv(case, entries=4, tile_counts=(row_tiles, 28), gpu=gpu).blocks

    assert [blocks(row_tiles) for row_tiles in (448, 1344, 1792)] == [131, 131, 131]  # OPT-30B
    assert [blocks(row_tiles) for row_tiles in (1, 131, 132, 1320)] == [1, 131, 132, 132]
    assert blocks(1344, tokens=2) == blocks(1344, (8, 0)) == 132


def test_light_weights_share_all_multiprocessors() -> None:
    """Two blocks to one: a multiprocessor left out would get two blocks of the next launch."""
    plan = plan_gemv(GemvCase(4, 128, 16, 1), entries=4, tile_counts=(256, 16), gpu=H200)
    assert (plan.blocks, plan.unit.arguments[-1]) == (132, 2)


@pytest.mark.parametrize(
    ("bits", "size", "expected"),
    [
        *[(1, 512, (8, 3, 2)), (1, 576, (16, 3, 1)), (1, 768, (12, 4, 1)), (1, 1024, (16, 4, 1))],
        *[(2, 448, (8, 4, 2)), (2, 512, (8, 4, 2)), (2, 768, (16, 5, 1))],
        *[(3, 512, (16, 4, 1)), (3, 768, (16, 7, 1)), (4, 256, (8, 4, 2)), (4, 512, (16, 4, 1)), (4, 768, (16, 5, 1))],
    ],
    ids=lambda value: str(value),
)
def test_rings_are_deep_where_there_is_much_to_read(bits: int, size: int, expected: tuple[int, int, int]) -> None:
    """(warps, slots, blocks on a multiprocessor) that were fastest at size row tiles x size / 16 k tiles."""
    plan = plan_gemv(GemvCase(bits, 128, 16, 1), entries=bits, tile_counts=(size, size // 16), gpu=H200)
    *_, warps, _, depth, resident = plan.unit.arguments
    assert (warps, depth, resident) == expected


@pytest.mark.parametrize(
    ("bits", "size", "expected"),
    [
        *[(1, 256, (12, 4, 2)), (1, 768, (12, 4, 2)), (1, 1024, (16, 4, 2))],
        *[(2, 512, (16, 2, 2)), (2, 768, (12, 4, 2))],
        (4, 1024, (12, 2, 2)),
    ],
    ids=lambda value: str(value),
)
def test_pairs_of_blocks_prepare_half_of_four_tokens_each(bits: int, size: int, expected: tuple[int, int, int]) -> None:
    """(warps, tiles per slot, slots) that were fastest at size row tiles x size / 16 k tiles, all in one pass."""
    k_tiles = size // 16
    plan = plan_gemv(GemvCase(bits, 128, 16, 4, int8=True), entries=bits, tile_counts=(size, k_tiles), gpu=H200)
    assert plan.unit.arguments[-4:-1] == expected
    assert (plan.cluster, plan.blocks, plan.pass_tiles) == (2, 132, k_tiles // 2)


@pytest.mark.parametrize(("bits", "warps"), [(4, 12), (8, 8)], ids=lambda value: str(value))
def test_pairs_for_narrow_groups_have_as_many_warps_as_let_x_come_in_one_pass(bits: int, warps: int) -> None:
    plan = plan_gemv(GemvCase(bits, 32, 16, 4, int8=True), entries=bits, tile_counts=(768, 48), gpu=H200)
    assert (plan.warps, plan.cluster, plan.pass_tiles) == (warps, 2, 24)


def test_blocks_stay_alone_where_pairs_would_prepare_x_twice_or_cannot_halve_it() -> None:
    case = GemvCase(2, 128, 16, 4, int8=True)
    sizes = [(1792, 28), (64, 1), (768, 48)]  # more row tiles than sums find room for; one k tile; enough of both
    plans = [plan_gemv(case, entries=2, tile_counts=counts, gpu=H200) for counts in sizes]
    assert [plan.cluster for plan in plans] == [1, 1, 2]
    assert plan_gemv(case, entries=2, tile_counts=sizes[-1], gpu=Gpu((8, 0), 132)).cluster == 1


@pytest.mark.parametrize(
    ("tokens", "row_tiles", "expected"),
    [(8, 768, (8, 132)), (8, 1024, (8, 132)), (8, 1792, (8, 264)), (4, 1024, (12, 132)), (1, 8016, (16, 264))],
    ids=lambda value: str(value),
)
def test_blocks_come_in_whole_rounds_one_where_a_layout_allows(
    tokens: int, row_tiles: int, expected: tuple[int, int]
) -> None:
    case = gemv_case(4, 128, 16, tokens, int8=tokens > 1)
    plan = plan_gemv(case, entries=4, tile_counts=(row_tiles, 64), gpu=H200)
    assert (plan.warps, plan.blocks) == expected


def test_small_multiprocessors_take_long_rows_in_passes() -> None:
    plan = plan_gemv(GemvCase(4, 128, 16, 2), entries=5, tile_counts=(448, 112), gpu=Gpu((8, 6), PROCESSORS))
    assert plan.pass_tiles < 112
