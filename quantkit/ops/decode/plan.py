"""How attention over a KV cache is split among blocks (split-KV)."""

from __future__ import annotations

from functools import cache

from quantkit.ops.decode.instances import FEW_HEADS, MANY_HEADS, SHARING_BLOCKS, SPLIT_STEP, AttentionBlock

SPLIT_ENTRIES = 4096
"""Entries of the cache whose scores a block of one head keeps in shared memory, at most."""

_SPLIT_SCORES = 8192  # of all heads of a block
_SHARING_LOAD = {4: 1.5, 2: 0.75}  # blocks per multiprocessor at least, by the heads of a block
_SHARING_WASTE = 4 / 3  # heads computed per head at most

_ROUND, _COMBINE, _COMBINED_SPLIT = 192, 256, 16  # in entries read: start of a round of blocks; combining; per split
_MOST_SPLITS = 64


@cache
def split_count(capacity: int, blocks: int, processors: int, heads: int = 1) -> int:
    """Splits of a cache that take the least time on so many multiprocessors.

    blocks: of one split, of which a multiprocessor holds two where they compute several heads.
    """
    together = processors * (2 if heads > 1 else 1)

    def cost(splits: int) -> int:
        rounds = -(-blocks * splits // together)
        combine = _COMBINE + splits * _COMBINED_SPLIT if splits > 1 else 0
        return rounds * (_ROUND + -(-capacity // splits)) + combine

    least = -(-capacity // min(SPLIT_ENTRIES, _SPLIT_SCORES // heads))
    return min(range(least, max(least, _MOST_SPLITS) + 1), key=cost)


def head_blocks(kv_heads: int, heads_per_kv: int, block: AttentionBlock) -> int:
    """Blocks that compute all heads of a sequence."""
    return kv_heads * -(-heads_per_kv // block.heads)


@cache
def attention_block(sequences: int, kv_heads: int, heads_per_kv: int, processors: int) -> AttentionBlock:
    """The block for a batch: as many heads as share a cache where that still fills a GPU, and then small ones."""
    for block in SHARING_BLOCKS:
        blocks = head_blocks(kv_heads, heads_per_kv, block)
        few_idle = blocks * block.heads <= kv_heads * heads_per_kv * _SHARING_WASTE
        if few_idle and sequences * blocks >= processors * _SHARING_LOAD[block.heads]:
            return block
    all_heads = sequences * kv_heads * heads_per_kv
    return MANY_HEADS if all_heads * MANY_HEADS.threads >= processors * FEW_HEADS.threads else FEW_HEADS


def split_length(capacity: int, splits: int) -> int:
    """Entries of the longest split of a full cache."""
    return -(-capacity // (splits * SPLIT_STEP)) * SPLIT_STEP
