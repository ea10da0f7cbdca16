"""The truncation threshold above which a channel is split (FlattenQuant section 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import StatsError

_WHISKER = 1.5  # of the interquartile range, Eq 6


def boxplot_clip(absmax: Tensor) -> Tensor:
    """Clip channel maxima to the whiskers of their boxplot, Q1 - 1.5 IQR .. Q3 + 1.5 IQR (Eq 6).

    absmax: [K] fp32. Returns [K].
    Deviation: Eq 6 prints |X_j|; the maxima that Eq 7 averages are clipped, as section 4.2 ("outlier channels") says.
    """
    low, high = torch.quantile(absmax.float(), absmax.new_tensor([0.25, 0.75], dtype=torch.float32))
    reach = _WHISKER * (high - low)
    return absmax.clamp(low - reach, high + reach)


def truncation_threshold(absmax: Tensor, multiplier: float, *, outlier_clip: bool = True) -> float:
    """Threshold T above which a channel is split (Eq 6-7): multiplier times the mean of the (clipped) maxima.

    absmax: [K] fp32, max |x_j| per input channel, all >= 0. multiplier: beta, unitless; the paper uses 1.2-1.4.
    outlier_clip: apply the boxplot first. Returns T > 0 in x's units.
    Raises StatsError if absmax is empty, non-finite or all zero.
    """
    if absmax.numel() == 0:
        raise StatsError("no channel maxima were collected; calibrate on more text")
    if not torch.isfinite(absmax).all():
        raise StatsError("channel maxima hold NaN or Inf; calibrate again, the model overflows on this text")
    if not absmax.any():
        raise StatsError("every value is zero, so no scale fits it; keep this layer in floating point")
    maxima = boxplot_clip(absmax) if outlier_clip else absmax
    mean = maxima.double().mean().item()
    # More than three quarters of the channels at 0 put both whiskers there; the plain mean is the way out.
    return multiplier * (mean if mean > 0 else absmax.double().mean().item())
