"""How a KV cache is split among blocks."""

from __future__ import annotations

import pytest

from quantkit.ops.decode.instances import ATTENTION_BLOCKS, FEW_HEADS, MANY_HEADS, SPLIT_STEP, AttentionBlock
from quantkit.ops.decode.plan import SPLIT_ENTRIES, attention_block, head_blocks, split_count, split_length

PROCESSORS = 132


SCORES = 2 * SPLIT_ENTRIES  # of all heads of a block


@pytest.mark.parametrize("block", ATTENTION_BLOCKS, ids=str)
@pytest.mark.parametrize("blocks", [1, 32, 72, 500])
@pytest.mark.parametrize("capacity", [1, 64, 256, 4096, 4097, 8192, 9000, 200_000])
def test_splits_cover_the_cache_and_their_scores_fit(capacity: int, blocks: int, block: AttentionBlock) -> None:
    splits = split_count(capacity, blocks, PROCESSORS, block.heads)
    length = split_length(capacity, splits)
    assert splits * length >= capacity
    assert length % SPLIT_STEP == 0
    assert length <= SPLIT_ENTRIES + SPLIT_STEP
    assert block.heads * length <= SCORES + block.heads * SPLIT_STEP


def test_short_caches_and_full_gpus_are_not_split() -> None:
    assert split_count(256, 32, PROCESSORS) == 1
    assert split_count(SPLIT_ENTRIES, 100 * PROCESSORS, PROCESSORS) == 1


def test_a_long_cache_of_few_heads_is_split_among_the_idle_multiprocessors() -> None:
    few, many = split_count(SPLIT_ENTRIES, 8, PROCESSORS), split_count(SPLIT_ENTRIES, 64, PROCESSORS)
    assert few > many > 1
    assert 8 * few <= PROCESSORS


def test_a_longer_cache_never_has_fewer_splits() -> None:
    counts = [split_count(capacity, 32, PROCESSORS) for capacity in range(64, 60_000, 512)]
    assert counts == sorted(counts)


def test_many_heads_with_caches_of_their_own_take_small_blocks() -> None:
    blocks = [attention_block(sequences, 1, 1, PROCESSORS) for sequences in (32, 527, 528, 2048)]
    assert blocks == [FEW_HEADS, FEW_HEADS, MANY_HEADS, MANY_HEADS]


def test_heads_share_a_block_where_that_leaves_enough_blocks() -> None:
    shared = [attention_block(sequences, 8, 4, PROCESSORS).heads for sequences in (1, 6, 7, 24, 25, 64)]
    assert shared == [1, 1, 2, 2, 4, 4]
    assert [attention_block(64, 4, heads, PROCESSORS).heads for heads in (1, 2, 3, 5, 6, 7, 8)] == [1, 2, 4, 2, 4, 4, 4]


@pytest.mark.parametrize("block", ATTENTION_BLOCKS, ids=str)
def test_blocks_cover_every_head(block: AttentionBlock) -> None:
    for heads_per_kv in range(1, 12):
        blocks = head_blocks(3, heads_per_kv, block)
        assert blocks % 3 == 0
        assert heads_per_kv <= blocks // 3 * block.heads < heads_per_kv + block.heads
