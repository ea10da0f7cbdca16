"""How a bcq GEMV is launched: which layout suits a weight, how many blocks, how much of K at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, inf

from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import Gpu
from quantkit.errors import KernelError
from quantkit.ops.bcq.instances import (
    CLUSTER_BLOCKS,
    FLOAT_BYTES,
    MAILBOX_BYTES,
    SOME_TOKENS,
    TILE_N,
    WARP_TILES,
    GemvCase,
    GemvTile,
    gemv_tiles,
    gemv_unit,
)

_DEEP_PASSES = 2  # over K, at most, beside a deep ring
_SUMS_SHARE = {1: 0.2, CLUSTER_BLOCKS: 0.3}  # of shared memory, by cluster; more n tiles go to more blocks
_UNEVEN = 1.1  # times the steps of a layout whose warps end together, which is taken then
_RESIDENT_READS = 4 / 3  # what each of two such blocks reads at most, over the shared memory it has
_SPLIT_TILES = 80  # k tiles whose planes take longer by half than what a cluster costs; for one or two tokens


@dataclass(frozen=True)
class GemvPlan:
    """One launch: the instance, blocks per group of tokens, passes over K, shared memory; cluster: see GemvTile."""

    unit: CompileUnit
    blocks: int
    cluster: int
    pass_tiles: int
    shared_mem: int
    warps: int


@dataclass(frozen=True)
class _Problem:
    """A weight, in tiles, under a case on a GPU; entries: numbers per group and row."""

    case: GemvCase
    entries: int
    n_tiles: int
    k_tiles: int
    gpu: Gpu


def _table_tile(it: _Problem) -> GemvTile:
    first, *others = gemv_tiles(it.case, it.gpu.architecture)
    clusters = [tile for tile in others if tile.cluster is not None and _costs(it, tile) <= _costs(it, first)]
    if clusters:
        return min(clusters, key=lambda tile: _steps(it, tile) * tile.step_tiles)
    others = [tile for tile in others if tile.cluster is None]
    own_n_tiles = ceil(it.n_tiles / it.gpu.processors)
    # Two blocks where the next launch's first stages are a good part of what it reads at all, and no thread prepares
    # more than one word of x.
    reads = own_n_tiles * it.k_tiles * it.case.tile_bytes(it.entries)
    pair = next((tile for tile in others if tile.resident > 1), first)
    few = it.k_tiles <= pair.warps * WARP_TILES and reads <= _RESIDENT_READS * it.gpu.architecture.shared_limit(2)
    if few and pair.resident > 1:
        return pair
    others = [tile for tile in others if tile.resident == 1]
    if it.case.tokens == 1:
        # A ring with room for more than half of what its warp reads is full before x is read, and little is left then.
        steps = own_n_tiles * it.k_tiles / (first.step_tiles * first.warps)
        fitting = (tile for tile in others if tile.stages <= (steps + 1) / 2 and _passes(it, tile) <= _DEEP_PASSES)
        deep = [tile for tile in fitting if tile.warps == first.warps][:1]
        evener = [tile for tile in others if _steps(it, tile) * _UNEVEN <= _steps(it, first)]
        return next(iter(evener + deep), first)
    return next((tile for tile in (first, *others) if own_n_tiles <= _most_n_tiles(it, tile)), first)


def _steps(it: _Problem, tile: GemvTile) -> int:
    """Steps of all warps of a block, counting those in which a warp waits for the others."""
    own = _own_n_tiles(it, tile) * ceil(ceil(it.k_tiles / _cluster(it, tile)) / tile.step_tiles)
    return ceil(own / tile.warps) * tile.warps


def _own_n_tiles(it: _Problem, tile: GemvTile) -> int:
    """n tiles of each block, or of each cluster, if all of them run at once."""
    return ceil(it.n_tiles / max(1, it.gpu.processors // _cluster(it, tile)))


def _costs(it: _Problem, tile: GemvTile) -> tuple[int, float]:
    """How often x is prepared: rounds of blocks, passes over K."""
    return ceil(_own_n_tiles(it, tile) / _most_n_tiles(it, tile)), _passes(it, tile)


def _cluster(it: _Problem, tile: GemvTile) -> int:
    if not it.gpu.architecture.clusters:
        return 1
    if tile.cluster is not None:
        return min(tile.cluster, it.k_tiles)
    few = it.case.tokens < SOME_TOKENS and tile.resident == 1
    return CLUSTER_BLOCKS if few and it.k_tiles >= _SPLIT_TILES else 1


def _ranges(it: _Problem, tile: GemvTile) -> int:
    """How many parts the n tiles are divided into, one for a block or for a cluster."""
    at_once = max(1, it.gpu.processors // _cluster(it, tile))
    if it.case.tokens == tile.resident == 1 and it.gpu.architecture.overlap:
        at_once = _leave_one(it.n_tiles, at_once)
    # Whole rounds of blocks: as long as one, a last round of a few would leave the others idle.
    rounds = ceil(ceil(it.n_tiles / at_once) / _most_n_tiles(it, tile))
    return min(it.n_tiles, rounds * at_once)


def _shared_bytes(it: _Problem, tile: GemvTile, record_tiles: int) -> int:
    """Shared memory of a block that keeps the records of so many k tiles at once."""
    ring = tile.warps * tile.step_tiles * tile.stages * it.case.tile_bytes(it.entries)
    received = _sum_bytes(it.case) // CLUSTER_BLOCKS if _cluster(it, tile) > 1 else 0  # of the other block
    sums = (tile.warps * _sum_bytes(it.case) + received) * ceil(it.n_tiles / _ranges(it, tile))
    mailbox = MAILBOX_BYTES if it.gpu.architecture.clusters else 0
    return mailbox + ring + sums + it.case.record_bytes * record_tiles


def _passes(it: _Problem, tile: GemvTile) -> float:
    """Passes over a block's k tiles, as their records fit into shared memory; infinite if those of one step do not."""
    left = it.gpu.architecture.shared_limit(tile.resident) - _shared_bytes(it, tile, 0)
    fitting = left // it.case.record_bytes // tile.step_tiles * tile.step_tiles
    return ceil(ceil(it.k_tiles / _cluster(it, tile)) / fitting) if fitting > 0 else inf


def _sum_bytes(case: GemvCase) -> int:
    return TILE_N * case.tokens * FLOAT_BYTES  # of an n tile


def _most_n_tiles(it: _Problem, tile: GemvTile) -> int:
    """How many n tiles a block can keep the sums of."""
    share = _SUMS_SHARE[_cluster(it, tile)]
    return max(1, int(it.gpu.architecture.shared_limit(tile.resident) * share) // (tile.warps * _sum_bytes(it.case)))


def _leave_one(n_tiles: int, ranges: int) -> int:
    """One range less where the longest keeps its n tiles.

    A norm on a multiprocessor of its own neither waits for a block to end nor keeps one of the next launch waiting. Not
    where a multiprocessor holds two blocks: it has room for a norm, and the spare one would get two of the next launch.
    """
    fewer = max(1, ranges - 1)
    return fewer if ceil(n_tiles / fewer) == ceil(n_tiles / ranges) else ranges


@cache
def plan_gemv(
    case: GemvCase, *, entries: int, tile_counts: tuple[int, int], gpu: Gpu, tile: GemvTile | None = None
) -> GemvPlan:
    """The instance, blocks, passes and shared memory of one launch.

    entries: numbers per group and row. tile_counts: (n tiles, k tiles) of the weight. tile: not the table's layout.
    Raises KernelError where not even one step's records of x fit beside the rings.
    """
    it = _Problem(case, entries, *tile_counts, gpu)
    tile = tile or _table_tile(it)
    passes, cluster = _passes(it, tile), _cluster(it, tile)
    if passes == inf:
        raise KernelError(f"{case.products.source.file}: a layout of {tile} does not fit into shared memory")
    pass_tiles = ceil(ceil(ceil(it.k_tiles / cluster) / passes) / tile.step_tiles) * tile.step_tiles
    shared_mem = _shared_bytes(it, tile, pass_tiles)
    return GemvPlan(gemv_unit(case, tile), _ranges(it, tile) * cluster, cluster, pass_tiles, shared_mem, tile.warps)
