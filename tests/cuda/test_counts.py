"""Counts by which blocks wait for each other: who shares them, and that all are zero at first."""

import torch

from quantkit.cuda.counts import Counts

CPU = torch.device("cpu")
FIRST, SECOND = 11, 12  # handles of streams


def _places(counts: torch.Tensor) -> set[int]:
    return set(range(counts.data_ptr(), counts.data_ptr() + counts.nbytes))


def test_launches_on_a_stream_share_counts_and_streams_do_not() -> None:
    counts = Counts(CPU, captured=8)
    mine = counts.of_stream(100, FIRST)
    assert len(mine) >= 100
    assert counts.of_stream(7, FIRST) is mine
    assert not _places(mine) & _places(counts.of_stream(100, SECOND))


def test_more_counts_than_a_stream_has_are_zero_again() -> None:
    counts = Counts(CPU, captured=8)
    few = counts.of_stream(1, FIRST)
    more = counts.of_stream(len(few) + 1, FIRST)
    assert len(more) == len(few) + 1
    assert not more.any()
    assert counts.of_stream(1, FIRST) is more


def test_every_captured_launch_has_counts_of_its_own() -> None:
    counts = Counts(CPU, captured=1000)
    launches = [counts.of_graph(count) for count in (3, 1, 40, 130)]
    assert [len(own) for own in launches] == [3, 1, 40, 130]
    taken = [_places(own) for own in (*launches, counts.of_stream(5, FIRST))]
    assert sum(map(len, taken)) == len(set().union(*taken))
    assert not any(own.any() for own in launches)


def test_a_graph_gets_zeros_where_the_cleared_memory_is_used_up() -> None:
    counts = Counts(CPU, captured=10)
    first, second, third = counts.of_graph(6), counts.of_graph(6), counts.of_graph(4)
    first.fill_(1), second.fill_(1)
    assert not third.any()  # what the second did not take
    late = counts.of_graph(1)
    assert not late.any()
    assert not _places(late) & (_places(first) | _places(second) | _places(third))
