from __future__ import annotations

import pytest
import torch

from quantkit.errors import StatsError
from quantkit.quantizers.flatten.threshold import boxplot_clip, truncation_threshold


def test_boxplot_clips_outlier_channels_worked_by_hand() -> None:
    # Quartiles 2 and 4, so the whiskers reach -1 and 7.
    assert boxplot_clip(torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])).tolist() == [1, 2, 3, 4, 7]


def test_threshold_is_the_multiplier_times_the_mean_of_the_clipped_maxima() -> None:
    absmax = torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])
    assert truncation_threshold(absmax, 1.3) == pytest.approx(1.3 * 17 / 5)
    assert truncation_threshold(absmax, 1.3, outlier_clip=False) == pytest.approx(1.3 * 110 / 5)


def test_threshold_of_equal_maxima_is_above_them() -> None:
    assert truncation_threshold(torch.full((8,), 2.0), 1.3) == pytest.approx(2.6)


def test_threshold_survives_mostly_dead_channels() -> None:
    absmax = torch.zeros(100)
    absmax[0] = 50.0
    assert truncation_threshold(absmax, 1.3) == pytest.approx(1.3 * 0.5)


@pytest.mark.parametrize(
    ("absmax", "match"),
    [
        (torch.tensor([]), "no channel"),
        (torch.tensor([1.0, float("nan")]), "NaN"),
        (torch.tensor([1.0, float("inf")]), "Inf"),
        (torch.zeros(4), "zero"),
    ],
    ids=["empty", "nan", "inf", "zero"],
)
def test_threshold_refuses_undefined_maxima(absmax: torch.Tensor, match: str) -> None:
    with pytest.raises(StatsError, match=match):
        truncation_threshold(absmax, 1.3)
