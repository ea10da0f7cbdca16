"""What statistics say beyond what was seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.stats import HISTOGRAM_BINS, LayerStats


def _stats(absmax: list[float], sample: list[list[float]], tokens: int) -> LayerStats:
    x = torch.tensor(sample).reshape(-1, len(absmax))
    zeros = torch.zeros(len(absmax))
    return LayerStats(torch.tensor(absmax), zeros, zeros, torch.zeros(HISTOGRAM_BINS), x, tokens)


def test_growth_follows_how_much_further_all_tokens_reached_than_the_sample() -> None:
    stats = _stats([4.0, 4.0], [[2.0, -2.0], [1.0, 0.5]], tokens=8)  # four times the tokens, twice as far
    assert stats.growth(4.0) == pytest.approx(2.0)
    assert stats.growth(16.0) == pytest.approx(4.0)
    assert stats.growth(1.0) == 1.0


def test_growth_is_of_the_mean_channel_and_leaves_out_those_that_were_never_driven() -> None:
    stats = _stats([8.0, 2.0, 0.0, 5.0], [[2.0, 2.0, 0.0, 0.0]], tokens=4)  # 4 times as far, and as far
    assert stats.growth(4.0) == pytest.approx(2.0)


@pytest.mark.parametrize("tokens", [1, 2], ids=["fewer-than-sampled", "all-sampled"])
def test_without_more_tokens_than_the_sample_nothing_grows(tokens: int) -> None:
    assert _stats([4.0], [[1.0], [2.0]], tokens).growth(16.0) == 1.0


def test_growth_without_a_sample_or_a_driven_channel_is_one() -> None:
    stats = _stats([4.0], [], tokens=8)
    assert stats.growth(16.0) == 1.0
    assert replace(stats, sample=torch.zeros(2, 1)).growth(16.0) == 1.0
