from __future__ import annotations

import pytest
import torch

from quantkit.errors import RecipeError
from quantkit.quantizers.flatten.bit_selection import (
    combined_ratio,
    histogram,
    kl_divergence,
    kl_ratio,
    quantized_distribution,
)


def test_divergence_of_a_distribution_from_itself_is_zero() -> None:
    counts = torch.tensor([3.0, 0.0, 5.0, 1.0])
    assert kl_divergence(counts, counts) == 0
    assert kl_divergence(counts, counts * 7) == pytest.approx(0, abs=1e-15)


def test_divergence_worked_by_hand() -> None:
    # 1/2 ln(1/2 / 1/4) + 1/2 ln(1/2 / 3/4)
    assert kl_divergence(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 3.0])) == pytest.approx(0.143841036)


def test_bins_of_one_level_share_their_counts_and_empty_bins_stay_empty() -> None:
    # INT4: levels at 0, 1/7 .. 1; with 14 bins the bin centres 1/28, 3/28, .. give levels 0, 1, 1, 2, 2, ... 7.
    counts = torch.zeros(14, dtype=torch.float64)
    counts[[1, 2, 3]] = torch.tensor([6.0, 2.0, 4.0], dtype=torch.float64)
    shared = quantized_distribution(counts, 4)
    assert shared[:5].tolist() == [0, 4, 4, 4, 0]
    assert shared.sum() == counts.sum()


def test_histogram_leaves_zeros_out_and_repeats_itself() -> None:
    values = torch.cat((torch.zeros(1000), torch.tensor([-2.0, 1.0])))
    counts = histogram(values, bins=4)
    assert (counts[[0, 2]] > 0).tolist() == [False, True]
    assert torch.equal(counts, histogram(values, bins=4))
    assert not histogram(torch.zeros(3), bins=4).any()


def test_ratio_is_above_one_for_data_and_one_for_what_both_widths_hold() -> None:
    assert kl_ratio(torch.randn(100_000)) > 1.2
    assert kl_ratio(torch.full((1000,), 3.0)) == 1.0
    assert kl_ratio(torch.zeros(10)) == 1.0


def test_peaked_data_suffers_more_from_int4_than_even_data() -> None:
    even, peaked = torch.rand(200_000), torch.randn(200_000).pow(5)
    assert kl_ratio(peaked) > kl_ratio(even)


def test_ratios_combine_as_named() -> None:
    assert combined_ratio(4.0, 1.0, "mean") == 2.0
    assert [combined_ratio(4.0, 1.0, how) for how in ("max", "activation", "weight")] == [4.0, 4.0, 1.0]
    with pytest.raises(RecipeError, match="kl_combine"):
        combined_ratio(1.0, 1.0, "min")
