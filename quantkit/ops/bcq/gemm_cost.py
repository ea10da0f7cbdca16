"""What the choice of the fused product's layout goes by: how many clock cycles of an H200 a multiprocessor is busy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from quantkit.ops.bcq.gemm_shapes import GROUP_WARPS, MANY_GROUPS
from quantkit.ops.bcq.instances import TILE_K
from quantkit.ops.bcq.order import Order

if TYPE_CHECKING:
    from quantkit.ops.bcq.gemm import GemmLayout, GemmProblem


@dataclass(frozen=True)
class Costs:
    """Of a weight in one order, in clock cycles.

    expand: of a k tile and 64 rows; plane: of each of its planes; product: of the same, on top, by tokens. latency: of
    one tile, however few there are. x_bytes: that a block gets from L2 in one cycle. shared: of a segment of an item
    that blocks share; collect: of a token's 64 rows and of each other such block. phase: of each but the first.
    row_group: of a token's 64 rows. many_groups: the part of a tile's cycles that it takes where a block has
    MANY_GROUPS.
    """

    expand: int
    plane: int
    product: Mapping[int, int]
    latency: int
    x_bytes: int
    shared: int
    collect: int
    phase: int
    row_group: int
    many_groups: float = 1.0


_PRODUCT = {16: 10, 32: 47, 64: 244, 128: 713, 256: 1600}
# Planes and codes: fitted to 343 times of layouts in 43 problems, in which the chosen layout took 1.5 % longer than the
# fastest on average and 10 % at most. A grid: to 340 times in 42 problems, 1.6 % and 12 %. Numbers: of an H100, 200
# times in 15 problems, 0.3 % and 1.6 %. Since K may be split, x_bytes of planes and codes and what
# sharing costs numbers: of an H100, in 120 problems of up to 128 tokens all orders have 0.4 % and 7 %. Planes and codes
# with 256 tokens: of an H100, in 36 problems of 256 to 2048 tokens all orders have 0.3 % and 4 %, of their six first.
# Many groups: of an H200, in 60 problems of 16 tokens 0.1 % and 3 %. Since loops have fewer branches codes and grids:
# of an H200, in 70 problems of 16 to 128 tokens 0.4 % and 4 %.
_COSTS = {
    Order.PLANES: Costs(391, 105, _PRODUCT, 850, 50, 6943, 0, 157, 19),
    Order.CODES: Costs(391, 75, _PRODUCT, 850, 50, 6943, 0, 157, 19),
    Order.GRID: Costs(607, 0, {16: 0, 32: 91, 64: 321, 128: 758, 256: 1500}, 1510, 302, 4918, 4, 229, 30),
}
_NUMBERS = Costs(639, 0, {16: 10, 32: 89}, 2040, 716, 4760, 15, 1033, 26, 0.8)
_ITEM = 1000  # of the start and the end of a whole item, in which nothing is multiplied


def cycles(it: GemmProblem, layout: GemmLayout) -> float:
    """Of the multiprocessor that is busy longest."""
    shape, phases = layout.shape, layout.shape.phases
    costs = _NUMBERS if it.multiplies_numbers(shape) else _COSTS[it.order]
    rounds = ceil(layout.whole_items / layout.blocks)
    tiles = ceil(rounds * it.k_tiles / layout.splits) + ceil(layout.shared_items * it.k_tiles / layout.blocks)
    busy_groups = phases * ceil(it.n_tiles / (layout.ranges * shape.partners * GROUP_WARPS))
    part = costs.many_groups if shape.groups >= MANY_GROUPS else 1.0
    tile = part * (costs.expand + it.weight_bits * costs.plane + costs.product[shape.tokens])
    step = max(busy_groups * tile, costs.latency + tile / 2, phases * shape.tokens * TILE_K * 2 / costs.x_bytes)
    shared = layout.shared_items and (1 if layout.blocks % layout.shared_items == 0 else 2)  # segments of a block
    others = max(0.0, layout.blocks / layout.shared_items - 1) if layout.shared_items else 0.0
    sums = ((rounds + shared) * costs.row_group + others * costs.collect) * shape.tokens * shape.row_groups
    sums += costs.shared * shared + (phases - 1) * costs.phase + rounds * _ITEM
    return ceil(tiles / phases) * step + sums
