"""The orders that a prepared bcq weight may be in; layout.py makes them and says what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from quantkit.formats.planes import MAX_BITS

GRID_PLANES = (2, *range(4, MAX_BITS + 1))  # not three: 10 % less time up to 16 tokens, up to 7 % more at 32
OFFSETS_APART = (1, 4, 8)  # planes whose tables of levels leave no room for an offset (kernels/bcq/levels.cuh)


class Order(StrEnum):
    """Of a prepared weight."""

    PLANES = "planes"
    CODES = "codes"
    GRID = "grid"

    @property
    def for_batches(self) -> bool:
        """Whether it is one of those for batches."""
        return self != Order.PLANES

    @property
    def number(self) -> int:
        """In the kernels' template arguments (kernels/bcq/level_codes.cuh)."""
        return list(Order).index(self)

    def scales(self, weight_bits: int) -> int:
        """Numbers stored for a group of a row, without an offset."""
        return 1 if self == Order.GRID else weight_bits


def offsets_apart(order: Order, weight_bits: int, entries: int) -> bool:
    """Whether the kernels add offsets behind their tables of levels, or with a grid's steps."""
    has_offset = entries > order.scales(weight_bits)
    return has_offset and (order == Order.GRID or weight_bits in OFFSETS_APART)


def orders_of(order: Order) -> Iterator[tuple[int, int]]:
    """(planes, entries) of weights in an order: every number of planes and place of their offsets."""
    for bits in range(1, MAX_BITS + 1) if order != Order.GRID else GRID_PLANES:
        scales = order.scales(bits)
        yield bits, scales
        if offsets_apart(order, bits, scales + 1):
            yield bits, scales + 1
