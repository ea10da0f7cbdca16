"""Shapes of the instances of the fused product (gemm.py): tiles, and which warps of a block do what."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.cuda.architectures import WARP_THREADS
from quantkit.ops.bcq.instances import FLOAT_BYTES, GEMM_MOST_STAGES, PANEL_K, TILE_K, TILE_N
from quantkit.ops.bcq.order import Order

GROUP_WARPS = 4
MANY_GROUPS = 5  # of consumer warps in a block, at least: seldom all wait
_PANEL_ROW_BYTES = PANEL_K * 2
# (tokens, row groups, phases, slots) of an instance's tile, block and rings.
WARPGROUP_SHAPES = (
    *((16, 4, 1, 3), (16, 3, 1, 3), (16, 2, 2, 3), (16, 1, 4, 3)),
    *((32, 4, 1, 2), (32, 3, 1, 3), (32, 2, 2, 2), (32, 1, 3, 3)),
    *((64, 4, 1, 2), (64, 3, 1, 3), (64, 2, 2, 2), (64, 1, 3, 2)),
    *((128, 3, 1, 3), (128, 2, 1, 4), (128, 1, 2, 2), (256, 2, 1, 3)),
)
_CROWDED = {(64, 4, 1, 2), (64, 2, 2, 2)}
# Of the shapes of warpgroups, what registers do not carry, by order, planes and whether offsets are added apart. The
# wide shapes spill a few bytes, and are the fastest in spite of it.
SPILLING: dict[tuple[Order, int, bool], set[tuple[int, int, int, int]]] = {
    (Order.CODES, 3, False): {(64, 2, 2, 2), (128, 4, 1, 2)},
    (Order.PLANES, 7, False): {(64, 2, 2, 2)},
    (Order.PLANES, 8, False): _CROWDED,
    (Order.PLANES, 8, True): _CROWDED,
    (Order.CODES, 8, True): _CROWDED,
}
_NUMBERS = (
    *((16, 3, 2, 2), (16, 2, 3, 2), (16, 1, 4, 3), (16, 7, 1, 2)),
    *((32, 2, 2, 3), (32, 1, 3, 3), (32, 4, 1, 2)),
)
WIDE_NUMBERS = ((32, 7, 1, 2),)
_MANY_BITS = (  # of which shared memory has room for fewer warps and slots
    *((16, 4, 1, 2), (16, 3, 1, 3), (16, 2, 2, 2), (16, 1, 4, 2)),
    *((32, 4, 1, 2), (32, 3, 1, 3), (32, 1, 3, 3)),
)
# By planes, in the place of those of as many tokens where numbers are multiplied.
NUMBER_SHAPES = {
    2: (*_NUMBERS, (32, 3, 2, 2), *WIDE_NUMBERS),
    4: (*_NUMBERS, (32, 3, 1, 3)),
    5: (*_NUMBERS, (16, 4, 1, 3), (16, 3, 1, 3), (32, 3, 1, 3)),
    **dict.fromkeys((6, 7, 8), _MANY_BITS),
}
WIDE_SHAPES = ((128, 4, 1, 2),)  # of warpgroups, for few planes in the orders for batches
NARROW_SHAPES = ((16, 1, 1, 2), (64, 2, 1, 2))  # of warpgroups, for many planes in narrow groups
PAIRED_SHAPES = ((256, 2, 1, 3),)  # whose blocks copy x for each other; smaller tiles gain nothing
WARP_SHAPES = ((16, 2, 1, 3), (16, 1, 2, 3), (16, 1, 1, 2), (64, 1, 1, 3))


@dataclass(frozen=True)
class GemmShape:
    """An instance without its types.

    tokens: of a tile. row_groups: groups of four consumer warps of a block, each with rows of its own. phases: as many
    times these groups, which take the k tiles of the same rows in turn. slots: of a warp's ring. warpgroups: whether
    the four warps of a group multiply together. partners: two where blocks in pairs take the same tokens, each with
    rows of its own, and copy x for each other.
    """

    tokens: int
    row_groups: int
    phases: int
    slots: int
    warpgroups: bool
    partners: int = 1

    @property
    def groups(self) -> int:
        """Of four consumer warps, in a block."""
        return self.row_groups * self.phases

    @property
    def threads(self) -> int:
        """Of a block: the consumers, and a group that copies x."""
        return (self.groups + 1) * GROUP_WARPS * WARP_THREADS

    @property
    def box_rows(self) -> int:
        """Rows of x that a block copies at once: partners share a panel."""
        return self.tokens // self.partners

    @property
    def panels(self) -> int:
        """Panels of 64 columns in a stage of x."""
        return max(1, min(4, 128 // self.tokens))

    @property
    def stage_bytes(self) -> int:
        """A stage of x."""
        return self.panels * self.tokens * _PANEL_ROW_BYTES

    @property
    def sum_bytes(self) -> int:
        """Sums of x, for every half tile of a stage."""
        return self.panels // 2 * self.tokens * FLOAT_BYTES

    @property
    def split_bytes(self) -> int:
        """Half of the sums of the other block that shares the k tiles of an item."""
        return self.tokens // 2 * self.row_groups * GROUP_WARPS * TILE_N * FLOAT_BYTES

    @property
    def tile_stages(self) -> int:
        """Stages of x in a k tile."""
        return TILE_K // PANEL_K // self.panels


def whole_stages(shape: GemmShape, room: int) -> int:
    """Stages of x where there is room for so many; 0 for too few.

    Phases take tiles in turn, and a stage is always of the same phase: one that is ahead cannot take a stage for filled
    that another phase still waits for, as the parity of a barrier tells two fillings apart and no more. There are two
    at least, as within a tile the next is waited for before one is given back; with many groups two for each phase, as
    they take longer than few where all wait for the next k tile of x.
    """
    round_stages = shape.phases * shape.tile_stages if shape.phases > 1 else 1
    stages = min(GEMM_MOST_STAGES, room) // round_stages * round_stages
    return stages if stages >= (2 * round_stages if shape.groups >= MANY_GROUPS else 2) else 0
