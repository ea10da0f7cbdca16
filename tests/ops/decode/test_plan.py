"""How a KV cache is split among blocks."""

from __future__ import annotations

import pytest

from quantkit.ops.decode.instances import SPLIT_STEP
from quantkit.ops.decode.plan import SPLIT_ENTRIES, attention_threads, split_count, split_length

PROCESSORS = 132


@pytest.mark.parametrize("heads", [1, 32, 72, 500])
@pytest.mark.parametrize("capacity", [1, 64, 256, 4096, 4097, 8192, 9000, 200_000])
def test_splits_cover_the_cache_and_their_scores_fit(capacity: int, heads: int) -> None:
    splits = split_count(capacity, heads, PROCESSORS)
    length = split_length(capacity, splits)
    assert splits * length >= capacity
    assert length % SPLIT_STEP == 0
    assert length <= SPLIT_ENTRIES + SPLIT_STEP


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


def test_many_heads_take_small_blocks() -> None:
    assert [attention_threads(heads, 132) for heads in (32, 527, 528, 2048)] == [512, 512, 128, 128]
