"""FlattenQuant: per-tensor static INT8 or INT4 on both operands, outlier channels cut over extra columns.

Source: Zhang et al. 2024, sections 4 and 5.1 (O1: bits 8; O2: bits mixed; O3: mixed with GPTQ). With ``flatten: false``
the same steps are the paper's baselines, W8A8 and SmoothQuant (Table 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.flatten import (
    COLUMN_STEP,
    FLATTEN_BITS,
    MAX_COLUMNS,
    FlattenSpec,
    pack_nibbles,
    padded_columns,
    take_slices,
)
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.flatten.allocation import clipped_splits, priced_splits
from quantkit.quantizers.flatten.bit_selection import KL_BINS, KL_COMBINES, combined_ratio, kl_ratio
from quantkit.quantizers.flatten.slicing import (
    Columns,
    Limited,
    Operands,
    Split,
    column_map,
    extended_columns,
    limit_columns,
    relative_error,
    split_channels,
)
from quantkit.quantizers.flatten.smoothing import SCALES, SMOOTHINGS
from quantkit.quantizers.flatten.threshold import truncation_threshold
from quantkit.quantizers.gptq import GptqOptions, gptq
from quantkit.stats import LayerStats


@dataclass(frozen=True)
class FlattenSettings:
    """bits: 4, 8, or "mixed" (chosen per layer by Eq 8).
    flatten: cut outlier channels over extra columns; false: plain per-tensor absmax quantization.
    rotate: true: rotate the residual stream first, folded into the weights (Llama family), so that what q, k, v, gate
        and up read has no large channels.
    smoothing: sigmoid (Eq 5), smoothquant (Xiao et al. 2023) or none. smoothing_strength: alpha.
    smooth_unfed: also smooth, at run time, layers that no norm or linear feeds; false leaves them alone.
    smooth_linears: fold into feeding linears too, not only into norms. bound_linears: s never makes the largest weight
        of such a linear larger, as its own codes have one scale.
    threshold_multiplier: beta, Eq 7. outlier_clip: the boxplot of Eq 6.
    max_flatten_ratio: extra columns per input channel at most; above it thresholds are raised or tails clamped, by
        calibration error.
    column_price: choose both thresholds, as multiples of Eq 7's, by the root of the output error plus this much per
        extra column (K of them count as 1); 0: the thresholds of Eq 7 as they are.
    few_columns: also try thresholds so far above Eq 7's that a single channel is cut; for a high column_price.
    cover_vocabulary: slices reach as far as any token of the vocabulary did, not only the calibration text.
    headroom: they reach this many times as far.
    clip: choose the input's threshold and slices by the output error on the calibration sample, clamp what is beyond;
        behind a prefix.
    pad_channels_to: K_ext is a multiple of this.
    kl_ratio_limit: gamma, Eq 8. kl_combine: mean, max, activation or weight. kl_bins: histogram bins.
    gptq, act_order, damping: GPTQ on the flattened weight.
    """

    bits: int | str = 8
    flatten: bool = True
    rotate: bool = False
    smoothing: str = "sigmoid"
    smoothing_strength: float = 0.5
    smooth_unfed: bool = True
    smooth_linears: bool = True
    bound_linears: bool = False
    threshold_multiplier: float = 1.3
    outlier_clip: bool = True
    max_flatten_ratio: float = 1.0
    column_price: float = 0.0
    few_columns: bool = False
    cover_vocabulary: bool = False
    headroom: float = 1.0
    clip: bool = False
    pad_channels_to: int = COLUMN_STEP
    kl_ratio_limit: float = 1.86
    kl_combine: str = "mean"
    kl_bins: int = KL_BINS
    gptq: bool = False
    act_order: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        _among("bits", self.bits, (*FLATTEN_BITS, "mixed"))
        _among("smoothing", self.smoothing, SMOOTHINGS)
        _among("kl_combine", self.kl_combine, KL_COMBINES)
        if not 0 <= self.smoothing_strength <= 1:
            raise RecipeError(f"smoothing_strength is {self.smoothing_strength}; choose 0 to 1")
        if self.threshold_multiplier <= 0:
            raise RecipeError(f"threshold_multiplier is {self.threshold_multiplier}; choose a factor above 0")
        if self.max_flatten_ratio < 0:
            raise RecipeError(f"max_flatten_ratio is {self.max_flatten_ratio}; choose 0 or more")
        if self.headroom < 1:
            raise RecipeError(f"headroom is {self.headroom}; choose a factor of 1 or more")
        if self.column_price < 0:
            raise RecipeError(f"column_price is {self.column_price}; choose 0 or more")
        if self.pad_channels_to <= 0 or self.pad_channels_to % COLUMN_STEP:
            raise RecipeError(f"pad_channels_to is {self.pad_channels_to}; choose a multiple of {COLUMN_STEP}")
        if self.kl_bins < 2:
            raise RecipeError(f"kl_bins is {self.kl_bins}; choose 2 or more")
        GptqOptions(self.damping, self.act_order)


def _among(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise RecipeError(f"{name} is {value!r}; choose {', '.join(str(choice) for choice in choices)}")


def stored_specs(settings: FlattenSettings, shape: Shape) -> tuple[FlattenSpec, ...]:
    """The smallest and the largest of what these settings may store a weight as: the data decide bits and columns."""
    bits = FLATTEN_BITS if settings.bits == "mixed" else (int(settings.bits),)
    ratios = (0.0, settings.max_flatten_ratio) if settings.flatten else (0.0,)
    widths = [padded_columns(shape[1] + int(shape[1] * ratio), settings.pad_channels_to) for ratio in ratios]
    found = (FlattenSpec(min(bits), min(bits), widths[0]), FlattenSpec(max(bits), max(bits), widths[-1]))
    return tuple(dict.fromkeys(found))


def needs_hessian(settings: FlattenSettings) -> bool:
    """Whether GPTQ is asked for."""
    return settings.gptq


@dataclass(frozen=True)
class Layout:
    """Everything decided about one layer before its codes are rounded.

    smooth_scale: [K] that divides the input at run time, or None. limited: set where the column limit was hit.
    kl_ratio: Eq 8, or None where the bits were given.
    """

    operands: Operands
    acts: Split
    weights: Split
    smooth_scale: Tensor | None
    limited: Limited | None
    kl_ratio: float | None

    def columns(self) -> Columns:
        """The column map, without padding."""
        return column_map(self.acts, self.weights)


def plan_layout(layer: LayerInput, settings: FlattenSettings) -> Layout:
    """Smooth the statistics, choose thresholds, slices and bits of one layer (sections 4.1, 4.2).

    Raises StatsError naming the layer for statistics that hold NaN or Inf, or are all zero.
    """
    stats = layer.stats
    assert stats is not None  # needs_stats
    if not torch.isfinite(stats.absmax).all() or not torch.isfinite(stats.mean_square).all():
        raise StatsError(f"{layer.name}: its input holds NaN or Inf on the calibration text")
    own = _run_time_scale(layer, settings)
    scale = layer.folded_scale if own is None else own
    device = layer.weight.device
    divisor = torch.ones_like(stats.absmax, device=device) if scale is None else scale.to(device)
    operands = Operands(
        rows=stats.sample.to(device).float() / divisor,
        weight=layer.weight if own is None else layer.weight * own,
        act_absmax=_reach(layer.name, stats, settings).to(device) / divisor,
    )
    try:
        acts, weights = _splits(operands, stats.absmax.to(device) / divisor, settings)
    except StatsError as error:
        raise StatsError(f"{layer.name}: {error}") from error
    limited = None
    if settings.clip:
        allowed = _most_columns(operands, settings) if settings.flatten else 0
        acts, weights = clipped_splits(operands, weights, settings.column_price, allowed)
    else:
        limited = _within_columns(operands, acts, weights, settings)
    if limited is not None:
        acts, weights = limited.acts, limited.weights
    ratio = _kl_ratio(operands, acts, weights, settings) if settings.bits == "mixed" else None
    if ratio is not None and ratio < settings.kl_ratio_limit:
        acts, weights = acts.with_bits(4), weights.with_bits(4)
    return Layout(operands, acts, weights, own, limited, ratio)


def _reach(name: str, stats: LayerStats, settings: FlattenSettings) -> Tensor:
    """How far a channel's slices must reach [K]. Raises StatsError where the vocabulary's reach was not taken."""
    if settings.cover_vocabulary and stats.vocabulary_absmax is None:
        raise StatsError(
            f"{name}: cover_vocabulary needs a calibration that ran the vocabulary, and this one is of an earlier "
            "version; collect it anew, or set cover_vocabulary=false"
        )
    return (stats.reach() if settings.cover_vocabulary else stats.absmax) * settings.headroom


def _within_columns(operands: Operands, acts: Split, weights: Split, settings: FlattenSettings) -> Limited | None:
    """The splits by the recipe's price, or those within its limit; None where the given ones stand."""
    allowed = _most_columns(operands, settings)
    if settings.flatten and settings.column_price:
        price, far = settings.column_price, settings.few_columns
        priced = priced_splits(operands, acts, weights, price, allowed, far=far)
        if priced is not None:
            return priced
    return limit_columns(operands, acts, weights, allowed) if extended_columns(acts, weights) > allowed else None


def _most_columns(operands: Operands, settings: FlattenSettings) -> int:
    return int(settings.max_flatten_ratio * operands.weight.shape[1])


def _run_time_scale(layer: LayerInput, settings: FlattenSettings) -> Tensor | None:
    if layer.folded_scale is not None or settings.smoothing == "none" or not settings.smooth_unfed:
        return None
    assert layer.stats is not None
    weight_absmax = layer.weight.abs().amax(dim=0)
    return SCALES[settings.smoothing](layer.stats.absmax.to(weight_absmax), weight_absmax, settings.smoothing_strength)


def _splits(operands: Operands, act_absmax: Tensor, settings: FlattenSettings) -> tuple[Split, Split]:
    """Both operands cut at their own threshold; in one piece up to their maximum with flatten: false.

    act_absmax: [K] of the calibration text, which the input's threshold follows.
    """
    bits = settings.bits if isinstance(settings.bits, int) else max(FLATTEN_BITS)
    splits = []
    weight_absmax = operands.weight.abs().amax(dim=0)
    pairs = (("input", act_absmax, operands.act_absmax), ("weight", weight_absmax, weight_absmax))
    for what, maxima, covered in pairs:
        try:
            threshold = truncation_threshold(maxima, settings.threshold_multiplier, outlier_clip=settings.outlier_clip)
        except StatsError as error:
            raise StatsError(f"{what}: {error}") from error
        splits.append(split_channels(covered, threshold if settings.flatten else float("inf"), bits))
    return splits[0], splits[1]


def _kl_ratio(operands: Operands, acts: Split, weights: Split, settings: FlattenSettings) -> float:
    columns = column_map(acts, weights)
    flat_x = take_slices(operands.rows / acts.scale, columns.channel, columns.act_segment, acts.top)
    flat_w = take_slices(operands.weight / weights.scale, columns.channel, columns.weight_segment, weights.top)
    return combined_ratio(kl_ratio(flat_x, settings.kl_bins), kl_ratio(flat_w, settings.kl_bins), settings.kl_combine)


def flattened_activations(layer: LayerInput, settings: FlattenSettings) -> Callable[[Tensor], Tensor]:
    """x [M, K] -> what the integer product sees of it, [M, C] fp32: act_scale times the codes, without padding.

    GPTQ's Hessian is of these, as it rounds the flattened weight.
    """
    layout = plan_layout(layer, settings)
    columns, acts = layout.columns(), layout.acts

    def features(x: Tensor) -> Tensor:
        smoothed = x.float() if layout.smooth_scale is None else x.float() / layout.smooth_scale
        codes = take_slices(acts.integers(smoothed), columns.channel, columns.act_segment, acts.top)
        return codes.mul_(acts.scale)

    return features


def quantize(layer: LayerInput, settings: FlattenSettings) -> PackedWeight:
    """Quantize one Linear to the ``flatten`` format.

    Raises StatsError naming the layer for undefined statistics or Hessians, RecipeError for too many columns.
    """
    layout = plan_layout(layer, settings)
    columns = layout.columns()
    codes, damping = _weight_codes(layer, layout, columns, settings)
    width = padded_columns(columns.channel.numel(), settings.pad_channels_to)
    if width > MAX_COLUMNS:
        raise RecipeError(
            f"{layer.name}: {width} columns overflow int32 sums (at most {MAX_COLUMNS}); lower max_flatten_ratio"
        )
    bits = layout.acts.bits
    spec = FlattenSpec(bits, bits, width, smooth=layout.smooth_scale is not None)
    padding = (0, width - columns.channel.numel())
    padded = torch.nn.functional.pad(codes, padding)
    tensors = {
        "codes": pack_nibbles(padded) if bits == 4 else padded,
        "source_channel": torch.nn.functional.pad(columns.channel, padding).int(),
        "source_segment": torch.nn.functional.pad(columns.act_segment, padding).int(),
        "weight_scale": codes.new_tensor([layout.weights.scale], dtype=torch.float32),
        "act_scale": codes.new_tensor([layout.acts.scale], dtype=torch.float32),
    }
    if layout.smooth_scale is not None:
        tensors["smooth_scale"] = layout.smooth_scale.float()
    report = _report(layout, columns, codes)
    if damping is not None:
        report["damping"] = damping
    return PackedWeight(spec, (layer.weight.shape[0], layer.weight.shape[1]), tensors, report)


def _weight_codes(
    layer: LayerInput, layout: Layout, columns: Columns, settings: FlattenSettings
) -> tuple[Tensor, float | None]:
    """Codes [N, C] int8 of the flattened weight, rounded to nearest or by GPTQ, and GPTQ's damping."""
    weights = layout.weights
    if not settings.gptq:
        integers = weights.integers(layout.operands.weight)
        return take_slices(integers, columns.channel, columns.weight_segment, weights.top).to(torch.int8), None
    assert layer.hessian is not None  # needs_hessian
    exact = take_slices(layout.operands.weight / weights.scale, columns.channel, columns.weight_segment, weights.top)

    def round_column(_column: int, values: Tensor) -> Tensor:
        return values.round().clamp_(-weights.top, weights.top)

    try:
        result = gptq(exact, layer.hessian, round_column, options=GptqOptions(settings.damping, settings.act_order))
    except StatsError as error:
        raise StatsError(f"{layer.name}: {error}") from error
    return result.weight.to(torch.int8), result.damping


def _report(layout: Layout, columns: Columns, codes: Tensor) -> dict[str, Any]:
    """What ``quantkit inspect`` shows of one layer."""
    operands, acts, weights = layout.operands, layout.acts, layout.weights
    channels = acts.slices.numel()
    flat_x = take_slices(acts.integers(operands.rows), columns.channel, columns.act_segment, acts.top)
    output = (flat_x @ codes.float().t()) * (acts.scale * weights.scale)
    clamped = operands.rows.abs() > acts.capacity() + acts.scale / 2
    report: dict[str, Any] = {
        "act_threshold": acts.threshold,
        "weight_threshold": weights.threshold,
        "extended_channels": columns.channel.numel() - channels,
        "flatten_ratio": columns.channel.numel() / channels - 1,
        "clip_rate": clamped.float().mean().item(),
        "output_error": relative_error(operands.rows @ operands.weight.t(), output),
    }
    if layout.kl_ratio is not None:
        report["kl_ratio"] = layout.kl_ratio
    if layout.limited is not None:
        uncovered = (acts.capacity() / operands.act_absmax.clamp_min(acts.scale)).min().item()
        report["column_limit"] = (
            f"thresholds raised x{layout.limited.act_step:g} (input) and x{layout.limited.weight_step:g} (weight); "
            + ("every channel covered" if uncovered >= 1 else f"inputs clamped down to {uncovered:.3g} of the maximum")
        )
    return report
