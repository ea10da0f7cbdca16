"""Bipolar-INT quantizer: symmetric codes without a zero, the clip range of weights and activations by search.

Source: Bipolar-INT sections 3.1-3.2 for the format and its arithmetic. The paper takes its quantized models from
other work and says nothing of how ranges are chosen; here each range is the one with the least squared error of the
layer's output over the calibration sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.bcq import group_width
from quantkit.formats.bipolar import (
    FLOAT_ACT_BITS,
    PER_TOKEN,
    BipolarSpec,
    act_values,
    check_exact,
    codes_to_values,
    decoded_scales,
    dequantize_bipolar,
    largest_scale,
    nearest_codes,
    step_of_range,
)
from quantkit.formats.hadamard import block_width, rotate, unrotate
from quantkit.formats.planes import pack_codes
from quantkit.quantizers.base import LayerInput, error_report
from quantkit.quantizers.bcq.groups import SMALLEST_SCALE
from quantkit.quantizers.gptq import GptqOptions, InverseFactor, gptq, inverse_factor
from quantkit.quantizers.rotated_inputs import rotated_inputs

# Clip ranges tried, as fractions of absmax: powers of two first, then finer ones around the best.
_COARSE = tuple(2.0**-i for i in range(12))
_FINE = tuple(2.0 ** (i / 8) for i in (-6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6))
# Factors of scale codes that are tried, over the one by which a row's largest scale is the largest code.
_STRETCHES = tuple(0.75 + 0.0125 * i for i in range(33))


@dataclass(frozen=True)
class BipolarSettings:
    """weight_bits p 1-8; act_bits q 1-8, or 16 for weight only; group_size -1 for one scale per output channel.

    act_granularity: per_token (dynamic) or per_tensor (static). search: choose clip ranges on the calibration
    sample; without it the range is absmax. rotate: fold a Hadamard rotation of the residual stream into the weights
    first (Llama family). gptq, damping: round column by column, each error moved to the columns that follow. act_order:
    for gptq, columns of large inputs first, and each range by what that leaves of a column's error (search: true).
    act_zero: a zero point per token, so that one-sided ranges use all codes. rotate_inputs: rotate each Linear's input
    by Hadamard blocks before it is quantized (formats/hadamard.py); any family. scale_bits: of a scale per group, 16
    or 8: codes with a factor per row, which keep a row's product one sum of integers.
    """

    weight_bits: int = 4
    act_bits: int = 4
    group_size: int = -1
    act_granularity: str = PER_TOKEN
    search: bool = True
    rotate: bool = False
    gptq: bool = False
    damping: float = 0.01
    act_order: bool = False
    act_zero: bool = False
    rotate_inputs: bool = False
    scale_bits: int = 16

    def __post_init__(self) -> None:
        self.spec()
        GptqOptions(self.damping)
        if self.act_order and not self.gptq:
            raise RecipeError("act_order is the order of GPTQ's columns; set gptq=true")

    def spec(self) -> BipolarSpec:
        """The format these settings write; raises RecipeError on impossible values."""
        return BipolarSpec(
            self.weight_bits,
            self.act_bits,
            self.group_size,
            self.act_granularity,
            self.act_zero,
            self.rotate_inputs,
            self.scale_bits,
        )


def stored_specs(settings: BipolarSettings, shape: Shape) -> tuple[BipolarSpec]:
    """What these settings store a weight as. Raises RecipeError for inputs that cannot be rotated."""
    if settings.rotate_inputs:
        block_width(shape[1])
    return (settings.spec(),)


def needs_stats(settings: BipolarSettings) -> bool:
    """Activation ranges come from the calibration sample; weight-only quantization can do without one."""
    return settings.act_bits != FLOAT_ACT_BITS


def needs_hessian(settings: BipolarSettings) -> bool:
    """GPTQ needs E[x x^T]."""
    return settings.gptq


def quantize(layer: LayerInput, settings: BipolarSettings) -> PackedWeight:
    """Quantize one Linear to bipolar-INT.

    Raises RecipeError where the layer is so wide that integer sums could overflow, StatsError without statistics.
    """
    spec, shape = settings.spec(), (layer.weight.shape[0], layer.weight.shape[1])
    sample = None if layer.stats is None else layer.stats.sample.to(layer.weight)
    original, absmax = layer, None if layer.stats is None else layer.stats.absmax.max()
    if settings.rotate_inputs:
        layer, sample = rotated_inputs(layer), None if sample is None else rotate(sample)
        absmax = None if sample is None or not sample.numel() else sample.abs().max()
    solve = _solve_of(layer, settings) if settings.gptq else None
    stored = weight_scales(layer.weight, sample, settings, None if solve is None else solve.importance)
    scales = decoded_scales(stored["scales"], stored.get("scale_factors"))
    spread = scales.repeat_interleave(group_width(settings.group_size, shape[1]), dim=1)[:, : shape[1]]
    target = layer.weight if solve is None else _compensated(layer.weight, spread, solve, settings)
    codes = nearest_codes(target, spread, settings.weight_bits)
    tensors = {"bit_planes": pack_codes(codes, settings.weight_bits), **stored}
    dequantized = dequantize_bipolar(tensors["bit_planes"], scales, shape[1], settings.group_size)
    report: dict[str, Any] = error_report(original, unrotate(dequantized) if settings.rotate_inputs else dequantized)
    if settings.act_bits != FLOAT_ACT_BITS:
        check_exact(settings.weight_bits, settings.act_bits, shape[1], settings.act_zero, spec.coded)
        if absmax is None or sample is None or not sample.shape[0]:
            raise StatsError(f"{layer.name}: quantized activations need a calibration sample of this layer's input")
        tensors["act_clip"], error = activation_clip(layer.weight, sample, absmax, settings)
        report["act_output_error"] = error
    return PackedWeight(spec, shape, tensors, report)


def weight_scales(
    weight: Tensor, sample: Tensor | None, settings: BipolarSettings, importance: Tensor | None = None
) -> dict[str, Tensor]:
    """The scales of weight [N, K] as they are stored: per row and group, the range with the least squared output error.

    sample: [R, K] inputs of the layer, or None (then every input counts the same). The error of a group is that of
    its own contribution to the output. importance: [K], of a squared error of each column, in place of the sample.
    """
    groups = list(_groups(weight, sample, settings, importance))
    scales = torch.stack([_group_scale(group, settings) for group in groups], dim=1)
    if not settings.spec().coded:
        return {"scales": scales}
    factors = scale_factors(scales, settings.weight_bits)
    codes = [_group_codes(*pair, factors, settings) for pair in zip(groups, scales.float().unbind(1), strict=True)]
    return {"scales": torch.stack(codes, dim=1), "scale_factors": factors}


def scale_factors(scales: Tensor, weight_bits: int) -> Tensor:
    """Factors [N, 1] fp16 in which scales [N, G] count as codes: of those tried whose nearest codes are nearest, as a
    share of each scale."""
    wanted, most = scales.float(), largest_scale(weight_bits)
    reach = wanted.amax(dim=1, keepdim=True) / most
    factors, least = torch.zeros_like(reach), torch.full_like(reach, torch.inf)
    for stretch in _STRETCHES:
        tried = torch.where(reach > 0, (reach * stretch).clamp_min(SMALLEST_SCALE), reach).half().float()
        ratio = wanted / tried
        error = (ratio.round().clamp(1, most) / ratio - 1).square()
        error = torch.where(wanted > 0, error, torch.zeros_like(error)).sum(dim=1, keepdim=True)
        factors = torch.where(error < least, tried, factors)
        least = torch.minimum(error, least)
    return factors.half()


def _group_codes(group: _Group, scale: Tensor, factors: Tensor, settings: BipolarSettings) -> Tensor:
    """uint8 codes [N] of a group's scales [N] fp32: the one below or above, by the group's error, or the nearest.

    A scale that is not 0 keeps a code that is not.
    """
    factor, most = factors[:, 0].float(), largest_scale(settings.weight_bits)
    ratio = scale / torch.where(factor > 0, factor, torch.ones_like(factor))
    below, above, nearest = (found.clamp(1, most) for found in (ratio.floor(), ratio.ceil(), ratio.round()))
    if settings.search:
        nearest = torch.where(group.error(above * factor) < group.error(below * factor), above, below)
    return torch.where(scale > 0, nearest, torch.zeros_like(nearest)).to(torch.uint8)


def activation_clip(weight: Tensor, sample: Tensor, absmax: Tensor, settings: BipolarSettings) -> tuple[Tensor, float]:
    """(act_clip [1] fp32, relative squared output error): the range least harmful to sample [R, K] times weight^T.

    Both are rotated already, where they are at all.
    absmax: scalar, the largest |x| of the whole calibration text: the range that a static clip is a fraction of.
    """
    coding = replace(settings.spec().coding, rotated=False)
    full = torch.ones(1, device=sample.device) if coding.per_token else absmax.reshape(1).to(sample)

    def error(fraction: Tensor) -> Tensor:
        values, step = act_values(sample, full * fraction, coding)
        return ((values.float() * step - sample) @ weight.T).square().sum().reshape(1)

    whole = torch.ones(1, device=sample.device)
    fraction = _search(error, whole) if settings.search else whole
    norm = (sample @ weight.T).square().sum().item()
    return (full * fraction).float(), error(fraction.to(sample)).item() / norm if norm else 0.0


@dataclass(frozen=True)
class _Solve:
    """How GPTQ goes through the columns. order: [K]. factor: of the inverse Hessian, in order.

    importance: [K] fp32, 1 / U[k, k]^2: what a squared error of column k still costs after the columns behind it have
    made up for it, which is the loss that GPTQ adds up; None where ranges go by the sample.
    """

    order: Tensor
    factor: InverseFactor
    importance: Tensor | None


def _solve_of(layer: LayerInput, settings: BipolarSettings) -> _Solve:
    """Raises StatsError naming the layer where its Hessian cannot be factored."""
    assert layer.hessian is not None
    columns = len(layer.hessian)
    order = torch.arange(columns, device=layer.hessian.device)
    if settings.act_order:
        order = torch.argsort(layer.hessian.diagonal(), descending=True, stable=True)
    try:
        factor = inverse_factor(layer.hessian[order][:, order], settings.damping)
    except StatsError as error:
        raise StatsError(f"{layer.name}: {error}") from error
    importance = torch.empty_like(factor.upper[0])
    importance[order] = factor.upper.diagonal().square().reciprocal()
    return _Solve(order, factor, importance if settings.act_order else None)


def _compensated(weight: Tensor, step: Tensor, solve: _Solve, settings: BipolarSettings) -> Tensor:
    """The weight after GPTQ on the fixed grid of ``step`` [N, K]: every value is a code's value times its step."""
    order = solve.order.tolist()

    def round_column(place: int, values: Tensor) -> Tensor:
        column = step[:, order[place]]
        codes = nearest_codes(values, column, settings.weight_bits)
        return codes_to_values(codes, settings.weight_bits).float() * column

    found = gptq(weight[:, solve.order], solve.factor, round_column, options=GptqOptions(settings.damping))
    target = torch.empty_like(weight)
    target[:, solve.order] = found.weight
    return target


@dataclass(frozen=True)
class _Group:
    """The columns of one group. weight: [N, g]. inputs: [R, g]. importance: [g], in their place. Either may be None."""

    weight: Tensor
    inputs: Tensor | None
    importance: Tensor | None
    weight_bits: int

    def error(self, step: Tensor) -> Tensor:
        """[N], of scales [N] fp32."""
        codes = nearest_codes(self.weight, step[:, None], self.weight_bits)
        difference = codes_to_values(codes, self.weight_bits).float() * step[:, None] - self.weight
        if self.importance is not None:
            return difference.square() @ self.importance
        return (difference if self.inputs is None else difference @ self.inputs.T).square().sum(dim=1)


def _groups(
    weight: Tensor, sample: Tensor | None, settings: BipolarSettings, importance: Tensor | None
) -> Iterator[_Group]:
    width = group_width(settings.group_size, weight.shape[1])
    for start in range(0, weight.shape[1], width):
        columns = slice(start, start + width)
        inputs = None if sample is None else sample[:, columns]
        weighed = None if importance is None else importance[columns]
        yield _Group(weight[:, columns], inputs, weighed, settings.weight_bits)


def _group_scale(group: _Group, settings: BipolarSettings) -> Tensor:
    """fp16 scale [N] of one group of columns."""
    absmax = group.weight.abs().amax(dim=1)

    def scale(fraction: Tensor) -> Tensor:
        step = step_of_range(absmax * fraction, settings.weight_bits).to(torch.float16)
        return torch.where(absmax > 0, step.clamp_min(SMALLEST_SCALE), step)

    def error(fraction: Tensor) -> Tensor:
        return group.error(scale(fraction).float())

    return scale(_search(error, torch.ones_like(absmax)) if settings.search else torch.ones_like(absmax))


def _search(error: Callable[[Tensor], Tensor], ones: Tensor) -> Tensor:
    """The fraction per element with the least error: powers of two, then eighths of an octave around the best."""
    best, lowest = ones.clone(), error(ones)
    for candidates in (_COARSE[1:], _FINE):
        base = best.clone() if candidates is _FINE else ones
        for candidate in candidates:
            trial = (base * candidate).clamp(max=1.0)
            found = error(trial)
            better = found < lowest
            best, lowest = torch.where(better, trial, best), torch.where(better, found, lowest)
    return best
