"""Running statistics against the same statistics of all rows at once."""

from __future__ import annotations

import pytest
import torch

from quantkit.calibration.collectors import Collector, RoutedCollector, sample_positions
from quantkit.errors import StatsError
from quantkit.stats import (
    HALF_TRUST_TOKENS,
    HISTOGRAM_BINS,
    SAMPLE_ROWS,
    LayerStats,
    histogram_edges,
    magnitude_histogram,
    trust,
)

MEAN_RTOL = 1e-6  # fp32 sums of a few hundred rows: some roundings of 2^-24


def _collect(parts: list[torch.Tensor], seed: int = 0) -> LayerStats:
    tokens = sum(len(part) for part in parts)
    collector = Collector("layer", parts[0].shape[1], sample_positions(tokens, seed), parts[0].device)
    for part in parts:
        collector.update(part)
    return collector.result(tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_statistics_equal_those_of_all_rows(device: torch.device, dtype: torch.dtype) -> None:
    x = (torch.randn(300, 9) * torch.logspace(-3, 3, 9)).to(dtype).to(device)
    stats = _collect(list(x.split([100, 1, 199])))
    rows = x.cpu().double()
    assert torch.equal(stats.absmax.double(), rows.abs().amax(0))
    torch.testing.assert_close(stats.mean_abs.double(), rows.abs().mean(0), rtol=MEAN_RTOL, atol=0)
    torch.testing.assert_close(stats.mean_square.double(), rows.square().mean(0), rtol=MEAN_RTOL, atol=0)
    assert stats.tokens == 300
    assert all(t.device.type == "cpu" for t in (stats.absmax, stats.histogram, stats.sample))


def test_sample_holds_the_seeded_rows_in_order() -> None:
    x = torch.arange(1000.0)[:, None].repeat(1, 2)
    stats = _collect(list(x.split(77)), seed=5)
    positions = sample_positions(1000, 5)
    assert stats.sample.shape == (SAMPLE_ROWS, 2)
    assert torch.equal(stats.sample[:, 0].long(), positions)
    assert len(set(positions.tolist())) == SAMPLE_ROWS
    assert not torch.equal(positions, sample_positions(1000, 6))


def test_short_run_samples_every_row() -> None:
    x = torch.randn(5, 3)
    assert torch.equal(_collect([x]).sample, x)


def test_histogram_counts_every_value_once_in_its_bin() -> None:
    x = torch.cat([torch.zeros(7), torch.randn(1000), torch.logspace(-30, 30, 200)])
    counts, edges = magnitude_histogram(x), histogram_edges()
    assert counts.shape == edges.shape == (HISTOGRAM_BINS,)
    assert counts.sum() == x.numel()
    assert counts[0] == 7
    expected = torch.bincount(torch.searchsorted(edges[:-16], x.abs(), right=True) - 1, minlength=HISTOGRAM_BINS)
    assert torch.equal(counts, expected)


def test_histogram_edges_rise_by_sixteen_bins_an_octave() -> None:
    edges = histogram_edges()
    assert edges[0] == 0
    finite = edges[:-16]
    assert bool((finite[1:] > finite[:-1]).all())
    start = int(torch.searchsorted(finite, torch.tensor(1.0)))
    assert finite[start] == 1.0
    assert finite[start + 1] == 1.0625
    assert finite[start + 16] == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_non_finite_input_names_the_layer(value: float) -> None:
    x = torch.randn(4, 3)
    x[2, 1] = value
    with pytest.raises(StatsError, match="layer: its input holds NaN or Inf"):
        _collect([x])


def test_rows_that_never_came_are_noticed() -> None:
    collector = Collector("layer", 3, sample_positions(8, 0), torch.device("cpu"))
    collector.update(torch.randn(4, 3))
    with pytest.raises(StatsError, match="saw 4 of 8 tokens"):
        collector.result(8)


def _routed(parts: list[torch.Tensor], seed: int = 0) -> LayerStats:
    collector = RoutedCollector("expert", 2, seed, torch.device("cpu"))
    for part in parts:
        collector.update(part)
    return collector.result(10_000)


def test_an_experts_sample_does_not_depend_on_how_its_rows_came() -> None:
    x = torch.arange(1000.0)[:, None].repeat(1, 2)
    whole, parts = _routed([x]), _routed(list(x.split([1, 77, 422, 500])))
    assert torch.equal(whole.sample, parts.sample)
    assert whole.tokens == parts.tokens == 1000
    rows = whole.sample[:, 0]
    assert len(rows) == SAMPLE_ROWS
    assert bool((rows[1:] > rows[:-1]).all())
    assert rows.max() > 500  # not the first rows alone
    assert not torch.equal(rows, _routed([x], seed=1).sample[:, 0])


def test_an_expert_that_saw_few_rows_samples_all_of_them() -> None:
    x = torch.randn(5, 2)
    assert torch.equal(_routed([x[:2], x[2:]]).sample, x)


def test_an_expert_without_tokens_has_statistics_of_zeros() -> None:
    stats = _routed([])
    assert stats.tokens == 0
    assert stats.sample.shape == (0, 2)
    assert not stats.absmax.any()
    assert not stats.mean_square.any()


def test_few_tokens_move_the_mean_squares_towards_each_other() -> None:
    x = torch.randn(HALF_TRUST_TOKENS, 2) * torch.tensor([1.0, 10.0])
    stats = _routed([x])
    middle = stats.mean_square.mean()
    torch.testing.assert_close(stats.tempered().mean_square, (stats.mean_square + middle) / 2)
    assert torch.equal(stats.tempered().absmax, stats.absmax)
    assert torch.equal(_routed([]).tempered().mean_square, torch.ones(2))
    assert trust(100 * HALF_TRUST_TOKENS) > 0.99
