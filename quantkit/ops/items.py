"""How the blocks of a persistent launch share out the items of a product; kernels/shared/items.cuh does as much."""

from __future__ import annotations

from collections.abc import Iterator

SHARED_ITEMS = 2
"""Items that a block has a share of, at most."""

TOKEN_BAND = 4
"""Tiles of tokens that blocks work on at once, for x and the weights to stay in L2."""


def shares(items: int, k_tiles: int, processors: int) -> Iterator[tuple[int, int]]:
    """(whole items, blocks) of every way: all items whole, or those of the last round shared by their k tiles.

    These are shared by all blocks, or by as many as have one item each. Every block has a share.
    """
    yield items, min(items, processors)
    whole = items // processors * processors
    even = processors // items * items
    for blocks in dict.fromkeys((processors, even) if even > items else (processors,)):
        if whole < items and blocks <= (items - whole) * k_tiles:
            yield whole, blocks
