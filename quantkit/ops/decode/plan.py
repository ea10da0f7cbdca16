"""How attention over a KV cache is split among blocks (split-KV)."""

from __future__ import annotations

from functools import cache

from quantkit.ops.decode.instances import ATTENTION_BLOCKS, SPLIT_STEP

SPLIT_ENTRIES = 4096
"""Entries of the cache whose scores a block keeps in shared memory."""

_ROUND, _COMBINE, _COMBINED_SPLIT = 192, 256, 16  # in entries read: start of a round of blocks; combining; per split
_MOST_SPLITS = 64


@cache
def split_count(capacity: int, heads: int, processors: int) -> int:
    """Splits of a cache that take the least time on so many multiprocessors."""

    def cost(splits: int) -> int:
        rounds = -(-heads * splits // processors)
        combine = _COMBINE + splits * _COMBINED_SPLIT if splits > 1 else 0
        return rounds * (_ROUND + -(-capacity // splits)) + combine

    least = -(-capacity // SPLIT_ENTRIES)
    return min(range(least, max(least, _MOST_SPLITS) + 1), key=cost)


def attention_threads(heads: int, processors: int) -> int:
    """Threads of a block of attention for so many heads of all sequences: small blocks where they fill a GPU."""
    large, small = ATTENTION_BLOCKS
    return small if heads * small >= processors * large else large


def split_length(capacity: int, splits: int) -> int:
    """Entries of the longest split of a full cache."""
    return -(-capacity // (splits * SPLIT_STEP)) * SPLIT_STEP
