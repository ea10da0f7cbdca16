"""Statistics of the input of one Linear: what every quantizer may know about the activations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SAMPLE_ROWS = 128

# A bin of the |x| histogram is the exponent and the four leading mantissa bits of fp32: sixteen bins per octave over
# the whole range, the same for every layer, so that two histograms of one layer are merged by addition.
_MANTISSA_BITS_KEPT = 4
_SHIFT = 23 - _MANTISSA_BITS_KEPT
# Tokens at which the statistics of an expert count for half.
HALF_TRUST_TOKENS = 128
HISTOGRAM_BINS = 1 << (8 + _MANTISSA_BITS_KEPT)


@dataclass(frozen=True)
class LayerStats:
    """Statistics of x [tokens, K], the input of one Linear, over the calibration text.

    absmax: [K] fp32, max |x| per input channel.
    mean_abs: [K] fp32, mean |x| per input channel.
    mean_square: [K] fp32, E[x^2] per input channel.
    histogram: [HISTOGRAM_BINS] int64, counts of |x| over the bins of ``histogram_edges``, all channels together.
    sample: [R, K] fp32, rows of x drawn without replacement, R <= SAMPLE_ROWS; the same tokens in every layer.
    tokens: number of rows seen; of an expert, those that were routed to it.
    vocabulary_absmax: [K] fp32, max |x| over tokens of the vocabulary in random order, or None where none were run:
        what a text that is unlike the calibration may bring. No other statistic counts these tokens.
    """

    absmax: Tensor
    mean_abs: Tensor
    mean_square: Tensor
    histogram: Tensor
    sample: Tensor
    tokens: int
    vocabulary_absmax: Tensor | None = None

    def reach(self) -> Tensor:
        """[K] fp32, the largest |x| seen at all."""
        return self.absmax if self.vocabulary_absmax is None else self.absmax.maximum(self.vocabulary_absmax)

    def growth(self, factor: float) -> float:
        """How many times as far x is expected to reach over ``factor`` times the tokens.

        By a power law, as of heavy tails: the reach of all tokens beside that of the sample, in the mean of the
        channels' logarithms. 1 where the sample is all there is.
        """
        rows = len(self.sample)
        if not 0 < rows < self.tokens:
            return 1.0
        seen = self.sample.abs().amax(dim=0)
        known = (seen > 0) & (self.absmax > 0)
        if not known.any():
            return 1.0
        further = (self.absmax[known] / seen[known]).clamp_min(1).log().mean().item()
        return float(factor ** (further / math.log(self.tokens / rows)))

    def divided(self, scale: Tensor) -> LayerStats:
        """Those of x / scale, scale [K] > 0, but for the histogram, which stays that of x."""
        return replace(
            self,
            absmax=self.absmax / scale,
            mean_abs=self.mean_abs / scale,
            mean_square=self.mean_square / scale.square(),
            sample=self.sample.float() / scale,
            vocabulary_absmax=None if self.vocabulary_absmax is None else self.vocabulary_absmax / scale,
        )

    def tempered(self) -> LayerStats:
        """The same with every channel's mean square moved towards their mean: as far as so few tokens prove little."""
        equal = self.mean_square.mean() if self.tokens else torch.ones(())
        return replace(self, mean_square=torch.lerp(equal, self.mean_square, trust(self.tokens)))


def stats_of_sample(stats: LayerStats, sample: Tensor) -> LayerStats:
    """Statistics of an input by its sample [R, K], R > 0, alone; ``tokens`` stays the number seen."""
    magnitude = sample.abs()
    return replace(
        stats,
        absmax=magnitude.amax(dim=0),
        mean_abs=magnitude.mean(dim=0),
        mean_square=sample.square().mean(dim=0),
        histogram=magnitude_histogram(sample),
        vocabulary_absmax=None,
        sample=sample,
    )


def trust(tokens: int) -> float:
    """n / (n + n0), the weight of what ``tokens`` rows of an expert's input say, beside that of equal channels."""
    return tokens / (tokens + HALF_TRUST_TOKENS)


def magnitude_histogram(x: Tensor) -> Tensor:
    """Counts of |x| [HISTOGRAM_BINS] int64; x: any shape, finite. Bin 0 holds the zeros (and fp32's subnormals)."""
    bits = x.float().contiguous().view(torch.int32) >> _SHIFT
    bins = bits.bitwise_and_(HISTOGRAM_BINS - 1)  # drops the sign
    return torch.bincount(bins.flatten(), minlength=HISTOGRAM_BINS)


def histogram_edges() -> Tensor:
    """Lower edges of the bins [HISTOGRAM_BINS] fp32, rising from 0; the last sixteen (Inf, NaN) stay empty."""
    return (torch.arange(HISTOGRAM_BINS, dtype=torch.int32) << _SHIFT).view(torch.float32)
