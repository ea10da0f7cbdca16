"""Statistics of the input of one Linear: what every quantizer may know about the activations."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerStats:
    """Statistics of x [tokens, K], the input of one Linear, over the calibration text.

    absmax: [K] fp32, max |x| per input channel.
    mean_abs: [K] fp32, mean |x| per input channel.
    mean_square: [K] fp32, E[x^2] per input channel.
    histogram: [HISTOGRAM_BINS] int64, counts of |x| over the fixed bins of
        ``quantkit.calibration.collectors`` (the same for every layer, so artifacts merge by addition).
    sample: [R, K] fp32, a bounded, seeded sample of the rows of x.
    tokens: number of rows seen.
    """

    absmax: Tensor
    mean_abs: Tensor
    mean_square: Tensor
    histogram: Tensor
    sample: Tensor
    tokens: int
