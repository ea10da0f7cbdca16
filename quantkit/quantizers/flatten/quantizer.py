"""FlattenQuant: per-tensor static INT8 or INT4 on both operands, outlier channels cut over extra columns.

Source: Zhang et al. 2024, sections 4 and 5.1 (O1: bits 8; O2: bits mixed; O3: mixed with GPTQ). With ``flatten: false``
the same steps are the paper's baselines, W8A8 and SmoothQuant (Table 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.flatten import (
    FLATTEN_BITS,
    MAX_COLUMNS,
    FlattenSpec,
    pack_nibbles,
    padded_columns,
    take_slices,
)
from quantkit.formats.hadamard import block_width, rotate
from quantkit.quantizers.base import AUTO, LayerInput
from quantkit.quantizers.flatten.allocation import clipped_splits, priced_splits, split_cost
from quantkit.quantizers.flatten.bit_selection import combined_ratio, kl_ratio
from quantkit.quantizers.flatten.settings import FlattenSettings
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
    split_rows,
)
from quantkit.quantizers.flatten.smoothing import SCALES
from quantkit.quantizers.flatten.threshold import truncation_threshold
from quantkit.quantizers.gptq import GptqOptions, gptq
from quantkit.quantizers.rotated_inputs import rotated_stats
from quantkit.stats import LayerStats


def stored_specs(settings: FlattenSettings, shape: Shape) -> tuple[FlattenSpec, ...]:
    """The smallest and the largest of what these settings may store a weight as: the data decide bits and columns.

    Raises RecipeError for inputs that cannot be rotated.
    """
    rotates = settings.rotate_inputs is True
    if rotates:
        block_width(shape[1])
    bits = FLATTEN_BITS if settings.bits == "mixed" else (int(settings.bits),)
    ratios = (0.0, settings.max_flatten_ratio) if settings.flatten else (0.0,)
    widths = [padded_columns(shape[1] + int(shape[1] * ratio), settings.pad_channels_to) for ratio in ratios]
    found = (
        FlattenSpec(min(bits), min(bits), widths[0], rotate_inputs=rotates, row_scales=settings.row_scales),
        FlattenSpec(max(bits), max(bits), widths[-1], rotate_inputs=rotates, row_scales=settings.row_scales),
    )
    return tuple(dict.fromkeys(found))


def needs_hessian(settings: FlattenSettings) -> bool:
    """Whether GPTQ is asked for."""
    return settings.gptq


@dataclass(frozen=True)
class Layout:
    """Everything decided about one layer before its codes are rounded.

    rotated: whether the input is rotated as the model runs, behind what its smoothing was folded into.
    smooth_scale: [K] that divides the input at run time, or None. limited: set where the column limit was hit.
    kl_ratio: Eq 8, or None where the bits were given.
    """

    operands: Operands
    acts: Split
    weights: Split
    rotated: bool
    smooth_scale: Tensor | None
    limited: Limited | None
    kl_ratio: float | None = None

    def columns(self) -> Columns:
        """The column map, without padding."""
        return column_map(self.acts, self.weights)

    def cost(self, price: float) -> float:
        """As of split_cost."""
        return split_cost(self.operands, self.acts, self.weights, price)


def plan_layout(layer: LayerInput, settings: FlattenSettings) -> Layout:
    """Smooth the statistics, choose thresholds, slices and bits of one layer (sections 4.1, 4.2).

    Raises StatsError naming the layer for statistics that hold NaN or Inf, or are all zero.
    """
    if settings.rotate_inputs == AUTO:
        plain, rotated = (_split_layer(layer, settings, rotated=rotated) for rotated in (False, True))
        # An input without a sample has no cost to compare, and stays as it is.
        layout = rotated if rotated.cost(settings.column_price) < plain.cost(settings.column_price) else plain
    else:
        layout = _split_layer(layer, settings, rotated=settings.rotate_inputs is True)
    if settings.bits != "mixed":
        return layout
    ratio = _kl_ratio(layout, settings)
    layout = replace(layout, kl_ratio=ratio)
    if ratio >= settings.kl_ratio_limit:
        return layout
    return replace(layout, acts=layout.acts.with_bits(4), weights=layout.weights.with_bits(4))


def _split_layer(layer: LayerInput, settings: FlattenSettings, *, rotated: bool) -> Layout:
    """Thresholds and slices, of 8 bits where the bits are to be chosen."""
    stats, weight = layer.stats, layer.weight
    assert stats is not None  # needs_stats
    if not torch.isfinite(stats.absmax).all() or not torch.isfinite(stats.mean_square).all():
        raise StatsError(f"{layer.name}: its input holds NaN or Inf on the calibration text")
    own = None if rotated else _run_time_scale(layer, settings)
    scale = layer.folded_scale if own is None else own
    if scale is not None:
        stats = stats.divided(scale.to(stats.absmax))
    if own is not None:
        weight = weight * own
    if rotated:
        stats, weight = rotated_stats(stats), rotate(weight)
    operands = _operands(layer.name, stats, weight, settings, rotated=rotated)
    try:
        acts, weights = _splits(operands, stats.absmax.to(weight.device), settings)
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
    return Layout(operands, acts, weights, rotated, own, limited)


def _operands(name: str, stats: LayerStats, weight: Tensor, settings: FlattenSettings, *, rotated: bool) -> Operands:
    reach, longer = _reach(name, stats, settings).to(weight.device), None
    if settings.flatten and not rotated and settings.longer_text > 1:
        longer = reach / settings.headroom * stats.growth(settings.longer_text)
    return Operands(stats.sample.to(weight.device).float(), weight, reach, longer)


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
    smooths = settings.smoothing != "none" and settings.smooth_unfed
    if layer.folded_scale is not None or not smooths:
        return None
    assert layer.stats is not None
    weight_absmax = layer.weight.abs().amax(dim=0)
    return SCALES[settings.smoothing](layer.stats.absmax.to(weight_absmax), weight_absmax, settings.smoothing_strength)


def _splits(operands: Operands, act_absmax: Tensor, settings: FlattenSettings) -> tuple[Split, Split]:
    """Both operands cut at their own threshold; in one piece up to their maximum with flatten: false.

    act_absmax: [K] of the calibration text, which the input's threshold follows.
    """
    bits = settings.bits if isinstance(settings.bits, int) else max(FLATTEN_BITS)

    def threshold(what: str, maxima: Tensor) -> float:
        try:
            found = truncation_threshold(maxima, settings.threshold_multiplier, outlier_clip=settings.outlier_clip)
        except StatsError as error:
            raise StatsError(f"{what}: {error}") from error
        return found if settings.flatten else float("inf")

    acts = operands.split_inputs(threshold("input", act_absmax), bits)
    if settings.row_scales:
        return acts, split_rows(operands.weight, bits)
    weight_absmax = operands.weight.abs().amax(dim=0)
    return acts, split_channels(weight_absmax, threshold("weight", weight_absmax), bits)


def _kl_ratio(layout: Layout, settings: FlattenSettings) -> float:
    operands, acts, weights, columns = layout.operands, layout.acts, layout.weights, layout.columns()
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
        inputs = rotate(x) if layout.rotated else x.float()
        smoothed = inputs if layout.smooth_scale is None else inputs / layout.smooth_scale
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
    spec = FlattenSpec(
        bits, bits, width, layout.smooth_scale is not None, layout.rotated, row_scales=settings.row_scales
    )
    padding = (0, width - columns.channel.numel())
    padded = torch.nn.functional.pad(codes, padding)
    tensors = {
        "codes": pack_nibbles(padded) if bits == 4 else padded,
        "source_channel": torch.nn.functional.pad(columns.channel, padding).int(),
        "source_segment": torch.nn.functional.pad(columns.act_segment, padding).int(),
        "weight_scale": _stored_scale(layout.weights, codes.device),
        "act_scale": codes.new_tensor([layout.acts.scale], dtype=torch.float32),
    }
    if layout.smooth_scale is not None:
        tensors["smooth_scale"] = layout.smooth_scale.float()
    report = _report(layout, columns, codes)
    if damping is not None:
        report["damping"] = damping
    return PackedWeight(spec, (layer.weight.shape[0], layer.weight.shape[1]), tensors, report)


def _stored_scale(weights: Split, device: torch.device) -> Tensor:
    """[1], or [N, 1] of rows, fp32."""
    scale = weights.scale if weights.by_row else [weights.scale]
    return torch.as_tensor(scale, dtype=torch.float32, device=device)


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
    output = (flat_x @ (codes * weights.scale).t()) * acts.scale
    clamped = operands.rows.abs() > acts.capacity() + acts.scale / 2
    report: dict[str, Any] = {
        "act_threshold": acts.threshold,
        "weight_threshold": weights.threshold.max().item() if weights.by_row else weights.threshold,
        "extended_channels": columns.channel.numel() - channels,
        "flatten_ratio": columns.channel.numel() / channels - 1,
        "clip_rate": clamped.float().mean().item(),
        "output_error": relative_error(operands.rows @ operands.weight.t(), output),
    }
    if layout.kl_ratio is not None:
        report["kl_ratio"] = layout.kl_ratio
    if layout.limited is not None:
        uncovered = (acts.capacity() / operands.act_absmax.clamp_min(acts.scale)).min().item()
        of_weight = "" if weights.by_row else f" and x{layout.limited.weight_step:g} (weight)"
        report["column_limit"] = f"thresholds raised x{layout.limited.act_step:g} (input){of_weight}; " + (
            "every channel covered" if uncovered >= 1 else f"inputs clamped down to {uncovered:.3g} of the maximum"
        )
    return report
