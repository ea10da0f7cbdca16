"""The bcq GEMVs' launch plans: they fit, cover the weight, and use what a GPU has. No tuned outcome stands here."""

from __future__ import annotations

from math import ceil

import pytest

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel, architecture
from quantkit.cuda.device import Gpu
from quantkit.errors import KernelError
from quantkit.ops.bcq.instances import SEGMENTS, GemvCase, GemvTile, bcq_units, gemv_case, gemv_tiles
from quantkit.ops.bcq.plan import GemvPlan, plan_gemv

PROCESSORS = 100
LONGEST_STEP = 4  # k tiles; records cover whole steps
ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
AMPERE, SMALL_AMPERE, HOPPER = (Gpu(architecture(*cc), PROCESSORS) for cc in ((8, 0), (8, 6), (9, 0)))
SIZES = [(1, 1), (256, 16), (768, 48), (448, 112), (1344, 28), (8016, 32)]  # n tiles, k tiles
ONE_TOKEN = GemvCase(4, 128, 16, 1)
SOME_TOKENS = gemv_case(2, 128, 16, 4, int8=True)


def plan(case: GemvCase, sizes: tuple[int, int], gpu: Gpu = HOPPER, tile: GemvTile | None = None) -> GemvPlan:
    return plan_gemv(case, entries=case.weight_bits + 1, tile_counts=sizes, gpu=gpu, tile=tile)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_plan_fits_its_gpu_and_covers_the_weight(sizes: tuple[int, int], row: Architecture) -> None:
    (n_tiles, k_tiles), known = sizes, set(bcq_units(row))
    for bits in range(1, 9):
        for segment in SEGMENTS:
            for tokens, int8 in [(1, False), (2, False), (8, False), (1, True), (2, True), (3, True), (8, True)]:
                if not int8 and Kernel.BCQ_BINARY_GEMV not in row.kernels:
                    continue
                case = gemv_case(bits, segment, 16 if segment > 64 else 8, tokens, int8=int8)
                made = plan(case, sizes, Gpu(row, PROCESSORS))
                assert made.shared_mem <= row.shared_limit()
                assert made.cluster == 1 or row.clusters
                assert 1 <= made.pass_tiles < k_tiles + LONGEST_STEP
                assert made.blocks >= min(n_tiles, PROCESSORS - made.cluster)
                assert ceil(n_tiles / (made.blocks // made.cluster)) <= ceil(n_tiles / (PROCESSORS // made.cluster))
                assert made.unit in known  # compiled, without spills, by the tests


@pytest.mark.parametrize("case", [ONE_TOKEN, SOME_TOKENS], ids=["one-token", "some-tokens"])
def test_very_long_rows_are_split_among_a_cluster_where_there_are_clusters(case: GemvCase) -> None:
    sizes = (448, 400)
    split = plan(case, sizes)
    assert split.cluster == 2
    assert split.blocks % 2 == 0
    assert split.pass_tiles <= ceil(sizes[1] / 2) + LONGEST_STEP
    assert plan(case, sizes, AMPERE).cluster == 1


def test_a_single_k_tile_cannot_be_split() -> None:
    assert plan(SOME_TOKENS, (64, 1)).cluster == 1
    assert plan(ONE_TOKEN, (64, 1)).cluster == 1


def test_a_layout_that_is_named_is_taken() -> None:
    pairs = GemvTile(12, 1, 2, cluster=2)
    made = plan(ONE_TOKEN, (448, 28), tile=pairs)
    assert (made.cluster, made.warps) == (2, 12)
    assert made.unit.arguments[-4:] == (12, 1, 2, 1)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelError, match="does not fit into shared memory"):
        plan(ONE_TOKEN, (448, 28), SMALL_AMPERE, GemvTile(16, 4, 4))


@pytest.mark.parametrize("n_tiles", [1, 99, 100, 101, 448, 1320, 1344])
def test_a_multiprocessor_is_left_out_only_where_no_block_gets_more_for_it(n_tiles: int) -> None:
    for tokens, gpu in ((1, HOPPER), (2, HOPPER), (1, AMPERE)):
        made = plan(GemvCase(4, 128, 16, tokens), (n_tiles, 28), gpu)
        assert ceil(n_tiles / made.blocks) == ceil(n_tiles / PROCESSORS)
        assert made.blocks >= min(n_tiles, PROCESSORS - 1)


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("n_tiles", [300, 1024, 1792, 8016])
def test_blocks_come_in_whole_rounds(n_tiles: int, tokens: int) -> None:
    """A last round of a few blocks would leave the other multiprocessors idle for as long as a whole one."""
    made = plan(gemv_case(4, 128, 16, tokens, int8=tokens > 1), (n_tiles, 64))
    at_once = PROCESSORS // made.cluster * made.cluster
    rounds = ceil(made.blocks / at_once)
    assert made.blocks in (rounds * at_once, rounds * (at_once - made.cluster), n_tiles * made.cluster)


def test_small_multiprocessors_take_long_rows_in_passes() -> None:
    sizes = (448, 112)
    assert plan(GemvCase(4, 128, 16, 2), sizes, SMALL_AMPERE).pass_tiles < sizes[1]


def test_every_layout_of_a_case_can_be_launched() -> None:
    for bits in range(1, 9):
        for tokens in (1, 2, 4, 8):
            case = gemv_case(bits, 128, 16, tokens, int8=tokens > 2)
            for tile in gemv_tiles(case, HOPPER.architecture):
                assert plan(case, (448, 28), tile=tile).shared_mem <= HOPPER.architecture.shared_limit(tile.resident)
