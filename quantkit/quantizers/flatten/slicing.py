"""Cutting channels into slices, and how far to cut when columns are limited (FlattenQuant Eq 2-4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.formats.flatten import max_code


@dataclass(frozen=True)
class Split:
    """How one operand is cut: values are scale times an integer, slices[k] integers of at most ``top`` add up to it.

    scale: > 0, in the operand's units; of a weight whose rows have their own [N, 1]. bits: 4 or 8.
    slices: [K] int64, >= 1, per input channel.
    """

    scale: Any
    bits: int
    slices: Tensor

    @property
    def top(self) -> int:
        """Largest code of one slice."""
        return max_code(self.bits)

    @property
    def threshold(self) -> Any:
        """T, what one slice holds; as ``scale``."""
        return self.scale * self.top

    @property
    def by_row(self) -> bool:
        """Whether rows have scales of their own. Nothing is cut then."""
        return isinstance(self.scale, Tensor)

    def with_bits(self, bits: int) -> Split:
        """The same threshold and slices at another width."""
        return Split(self.threshold / max_code(bits), bits, self.slices)

    def capacity(self) -> Tensor:
        """[K] fp32: largest |value| that each channel holds; above it values are clamped."""
        return self.slices.float() * self.threshold

    def integers(self, values: Tensor) -> Tensor:
        """values [R, K] -> rounded, clamped integers [R, K] fp32 (before they are sliced)."""
        limit = (self.slices * self.top).to(values)
        return torch.clamp((values / self.scale).round_(), -limit, limit)

    def dequantized(self, values: Tensor) -> Tensor:
        """values [R, K] as the sum of their slices stands for them."""
        return self.integers(values).mul_(self.scale)


def split_channels(absmax: Tensor, threshold: float, bits: int, *, limit: float | None = None) -> Split:
    """Cut channels at ``threshold``: slices = ceil(max |x_j| / T), each T = scale * (2**(bits-1) - 1) wide (Eq 1-2).

    absmax: [K]. threshold: T; the largest maximum is taken where that is smaller, and nothing is cut.
    limit: clamp channels at this |x| instead of covering them up to their maximum.
    Deviation: 1 + floor(max / T) columns of Eq 2 are ceil(max / T) here: the same unless max is a multiple of T,
    where the paper's last column would be 0 for every calibrated value.
    """
    top = max_code(bits)
    scale = float(torch.tensor(min(threshold, absmax.max().item()) / top, dtype=torch.float32))
    covered = absmax if limit is None else absmax.clamp_max(limit)
    steps = (covered.double() / scale).round()
    return Split(scale, bits, (steps / top).ceil().clamp_min(1).long())


def split_rows(weight: Tensor, bits: int) -> Split:
    """W [N, K] in one slice, with a scale for each row. Rows of zeros have a scale of 1."""
    absmax = weight.abs().amax(dim=1, keepdim=True)
    scale = torch.where(absmax > 0, absmax / max_code(bits), 1.0)
    return Split(scale, bits, torch.ones(weight.shape[1], dtype=torch.long, device=weight.device))


def extended_columns(acts: Split, weights: Split) -> int:
    """Columns beyond the K input channels that cutting both operands takes: sum of n_x * n_w - 1."""
    return int((acts.slices * weights.slices - 1).sum())


@dataclass(frozen=True)
class Columns:
    """What each column of the flattened operands carries, without padding: [C] int64 each.

    channel: input channel. act_segment, weight_segment: which slice of it, on either side.
    """

    channel: Tensor
    act_segment: Tensor
    weight_segment: Tensor


def column_map(acts: Split, weights: Split) -> Columns:
    """First every channel's first slices, in order; then the other pairs of slices, channel by channel.

    (sum_a x_a) (sum_b w_b) = sum_ab x_a w_b, so channel k has n_x[k] * n_w[k] columns.
    """
    channels = torch.arange(acts.slices.numel(), device=acts.slices.device)
    extra = acts.slices * weights.slices - 1
    channel = channels.repeat_interleave(extra)
    first = (extra.cumsum(0) - extra).repeat_interleave(extra)
    pair = torch.arange(channel.numel(), device=channel.device) - first + 1
    width = acts.slices[channel]
    zeros = torch.zeros_like(channels)
    return Columns(torch.cat((channels, channel)), torch.cat((zeros, pair % width)), torch.cat((zeros, pair // width)))


@dataclass(frozen=True)
class Operands:
    """What a choice of splits is judged on, both smoothed already.

    rows: [R, K] fp32, sampled rows of x. weight: [N, K] fp32. act_absmax: [K], how far slices of x must reach.
    longer_absmax: [K], how far x of a longer text is expected to reach, or None.
    """

    rows: Tensor
    weight: Tensor
    act_absmax: Tensor
    longer_absmax: Tensor | None = None

    def split_inputs(self, threshold: float, bits: int) -> Split:
        """As of split_channels, and one slice more where a longer text is expected to reach beyond the last."""
        split = split_channels(self.act_absmax, threshold, bits)
        if self.longer_absmax is None:
            return split
        return replace(split, slices=split.slices + (self.longer_absmax > split.capacity()).long())

    def split_weight(self, weights: Split, step: float) -> Split:
        """The weight cut at ``step`` times the threshold of ``weights``; these where rows have their own."""
        if weights.by_row:
            return weights
        return split_channels(self.weight.abs().amax(dim=0), weights.threshold * step, weights.bits)


def output_error(operands: Operands, acts: Split, weights: Split) -> float:
    """Mean over the sampled tokens of ||y - y'||^2 / ||y||^2 after rounding and clamping both operands.

    Every token counts alike: the residual stream is normalized before it is read, so a token whose output is a
    thousand times larger than the others does not matter a million times more.
    """
    exact = operands.rows @ operands.weight.t()
    rounded = acts.dequantized(operands.rows) @ weights.dequantized(operands.weight).t()
    return relative_error(exact, rounded)


def relative_error(exact: Tensor, approximate: Tensor) -> float:
    """Mean over rows of ||exact - approximate||^2 / ||exact||^2, leaving out rows that are 0."""
    norm = exact.double().square().sum(dim=-1)
    error = (approximate.double() - exact).square().sum(dim=-1)
    return (error[norm > 0] / norm[norm > 0]).mean().item() if (norm > 0).any() else 0.0


# Thresholds that the limited search tries, as multiples of the recipe's.
_STEPS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 32.0)


def clamp_error(operands: Operands, acts: Split) -> float:
    """Relative output error that clamping channels below their maximum stands for, beside output_error.

    The few tokens that reach a massive maximum are seldom in the sample, yet attention parks on them, so that an
    error there reaches every token of the window. A clamped channel therefore costs the share of itself that is lost,
    squared, times the square of its share in its token's output: 1 where it is all of it, next to nothing where it
    is one of many (what such a clamp costs is in the sample).
    """
    peak, capacity = operands.act_absmax, acts.capacity()
    cut = peak > capacity
    if not cut.any():
        return 0.0
    typical = (operands.rows @ operands.weight.t()).square().sum(dim=-1).median()
    energy = peak[cut].square() * operands.weight[:, cut].square().sum(dim=0)
    dominance = energy / (energy + typical)
    lost = 1 - capacity[cut] / peak[cut]
    return (lost * dominance).square().sum().item()


def most_slices(acts: Split, weights: Split, max_extended: int) -> Split | None:
    """``acts`` with the largest common cap on slices per channel that needs at most ``max_extended`` extra columns.

    None where even one slice per channel needs more.
    """
    low, high = 0, int(acts.slices.max())
    while low < high:
        middle = (low + high + 1) // 2
        capped = replace(acts, slices=acts.slices.clamp_max(middle))
        low, high = (middle, high) if extended_columns(capped, weights) <= max_extended else (low, middle - 1)
    return replace(acts, slices=acts.slices.clamp_max(low)) if low else None


@dataclass(frozen=True)
class Limited:
    """The splits chosen under a column limit, and by how much both thresholds were raised."""

    acts: Split
    weights: Split
    act_step: float
    weight_step: float


def limit_columns(operands: Operands, acts: Split, weights: Split, max_extended: int) -> Limited:
    """The splits within ``max_extended`` extra columns that cost the least output error on the calibration sample.

    Tried: raised input thresholds and, for each, clamping the channels that need the most slices. The weight's
    threshold is raised only where no input fits otherwise: its rounding noise is multiplied by the very outliers.
    """
    for weight_step in _STEPS:
        w = operands.split_weight(weights, weight_step)
        best, least = None, float("inf")
        for act_step in _STEPS:
            whole = operands.split_inputs(acts.threshold * act_step, acts.bits)
            a = most_slices(whole, w, max_extended)
            if a is None:
                continue
            error = output_error(operands, a, w) + clamp_error(operands, a)
            if error < least:
                best, least = Limited(a, w, act_step, weight_step), error
        if best is not None:
            return best
    whole = split_channels(operands.act_absmax, float("inf"), acts.bits)
    w = operands.split_weight(weights, float("inf"))
    weight_step = 1.0 if weights.by_row else w.threshold / weights.threshold
    return Limited(whole, w, whole.threshold / acts.threshold, weight_step)
