from math import ceil

import pytest

from quantkit.cuda.bcq_units import (
    LUT_SHARED,
    SEGMENTS,
    GemvCase,
    GemvTile,
    Gpu,
    bcq_units,
    gemv_case,
    gemv_tile,
    lut_residency,
    plan_gemv,
    segment_columns,
    shared_limit,
)
from quantkit.cuda.instances import COMPILED_CAPABILITIES
from quantkit.errors import KernelError

PROCESSORS = 100
LONGEST_TURN = 4  # k tiles; planes cover whole turns
IDS = [f"sm_{major}{minor}" for major, minor in COMPILED_CAPABILITIES]


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
    split = plan_gemv(case, gpu=Gpu((9, 0), 132), **sizes)
    assert (split.cluster, split.blocks, split.pass_tiles) == (2, 130, 56)
    assert plan_gemv(case, gpu=Gpu((8, 0), 132), **sizes).cluster == 1
    assert plan_gemv(case, gpu=Gpu((9, 0), 132), entries=5, tile_counts=(448, 28)).cluster == 1
    assert plan_gemv(GemvCase(4, 128, 16, 2), gpu=Gpu((9, 0), 132), **sizes).cluster == 1  # measured: slower
    pairs = GemvTile(12, 1, 2, cluster=2)
    assert plan_gemv(GemvCase(4, 128, 16, 8, int8=True), gpu=Gpu((9, 0), 132), tile=pairs, **sizes).cluster == 2


def test_one_multiprocessor_is_left_to_small_kernels_where_that_is_free() -> None:
    def blocks(row_tiles: int, capability: tuple[int, int] = (9, 0), tokens: int = 1) -> int:
        case, gpu = GemvCase(4, 128, 16, tokens), Gpu(capability, 132)
        return plan_gemv(case, entries=4, tile_counts=(row_tiles, 28), gpu=gpu).blocks

    assert [blocks(row_tiles) for row_tiles in (448, 1344, 1792)] == [131, 131, 131]  # OPT-30B
    assert [blocks(row_tiles) for row_tiles in (1, 131, 132, 1320)] == [1, 131, 132, 132]
    assert blocks(1344, tokens=2) == blocks(1344, (8, 0)) == 132


def test_light_weights_share_all_multiprocessors() -> None:
    """Two blocks to one: a multiprocessor left out would get two blocks of the next launch."""
    plan = plan_gemv(GemvCase(4, 128, 16, 1), entries=4, tile_counts=(256, 16), gpu=Gpu((9, 0), 132))
    assert (plan.blocks, plan.unit.arguments[-1]) == (132, 2)


@pytest.mark.parametrize(
    ("tokens", "row_tiles", "expected"),
    [(8, 768, (12, 132)), (8, 1024, (8, 132)), (8, 1792, (12, 264)), (4, 1024, (12, 132)), (1, 8016, (16, 264))],
    ids=lambda value: str(value),
)
def test_blocks_come_in_whole_rounds_one_where_a_layout_allows(
    tokens: int, row_tiles: int, expected: tuple[int, int]
) -> None:
    case = gemv_case(4, 128, 16, tokens, int8=tokens > 1)
    plan = plan_gemv(case, entries=4, tile_counts=(row_tiles, 64), gpu=Gpu((9, 0), 132))
    assert (plan.warps, plan.blocks) == expected


def test_small_multiprocessors_take_long_rows_in_passes() -> None:
    plan = plan_gemv(GemvCase(4, 128, 16, 2), entries=5, tile_counts=(448, 112), gpu=Gpu((8, 6), PROCESSORS))
    assert plan.pass_tiles < 112


@pytest.mark.parametrize(
    ("group_size", "columns"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128), (512, 256)]
)
def test_segment_is_the_widest_that_divides_the_group(group_size: int, columns: int) -> None:
    assert segment_columns(group_size) == columns


@pytest.mark.parametrize(
    ("segment", "tokens", "expected"),
    [
        *[(256, 1, (128, 4)), (128, 2, (128, 4)), (128, 4, (128, 4)), (64, 5, (64, 8)), (32, 30, (32, 8))],
        *[(64, 1, (64, 1)), (32, 2, (32, 2)), (32, 3, (32, 4))],
    ],
)
def test_int8_takes_four_or_eight_tokens_fewer_of_narrow_groups_and_segments_whose_sums_are_exact(
    segment: int, tokens: int, expected: tuple[int, int]
) -> None:
    case = gemv_case(3, segment, 16, tokens, int8=True)
    assert (case.segment, case.tokens) == expected
    largest_code = 2**15 - 1
    assert case.segment * largest_code < 2**22  # what fits between the powers of two around 1.5 * 2^23


def test_groups_of_no_whole_word_have_no_segment() -> None:
    with pytest.raises(KernelError, match="multiple of 32, not 40"):
        segment_columns(40)


def test_layouts_keep_two_slots_even_where_memory_is_short() -> None:
    for capability in COMPILED_CAPABILITIES:
        assert all(gemv_tile(GemvCase(8, segment, 16, 2), capability).depth >= 2 for segment in SEGMENTS)


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 2), ((8, 6), 1), ((8, 9), 1), ((9, 0), 3)], ids=IDS)
def test_look_up_blocks_share_a_multiprocessor(capability: tuple[int, int], most: int) -> None:
    counts = {lut_residency(bits, fine, capability) for bits in range(1, 9) for fine in (False, True)}
    assert max(counts) == most
    assert all(shared_limit(*capability, count) >= LUT_SHARED for count in counts)
