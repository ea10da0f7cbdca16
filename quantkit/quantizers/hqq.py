"""Half-quadratic quantization (HQQ): a uniform grid per group, fitted so that a few large errors may stay large.

Source: Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". The loss of a group is
sum |w - w'|^p with p < 1. Half-quadratic splitting brings in a second unknown e, the part of the error that is given
up, and minimizes sum |e|^p / p + (penalty / 2) (w - w' - e)^2 over one of them at a time, while the penalty grows:

    e  <-  sign(r) * max(0, |r| - |r|^(p - 1) / penalty),    r = w - w'        (generalized soft threshold)
    grid  <-  least squares of w - e on the codes; then the codes of w are rounded again.

Deviation: the source keeps the scale of the range and fits the zero point; here both follow from the least squares.
Deviation: r is counted in steps of the group's first grid, with a penalty that starts at 1, so that the same weights
in other units give the same codes. The source starts at 10 in the weights' own units, where almost none is given up.
Deviation: each group keeps the best of its rounds; the source stops the whole tensor when its mean error rises.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.bcq import BcqSpec, check_group_size, check_scale_bits, check_weight_bits
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq.coding import CodeShape, code_groups
from quantkit.quantizers.bcq.groups import SMALLEST_SCALE
from quantkit.quantizers.rounding import UniformGrid, fit_uniform

_FIRST_PENALTY, _PENALTY_GROWTH = 1.0, 1.01


@dataclass(frozen=True)
class HqqSettings:
    """weight_bits: 1-8. group_size: columns per grid, -1 for the row. norm: p of the loss, in 0..1. rounds: of the
    alternation; 0 is round-to-nearest between minimum and maximum. scale_bits: 16, or 8 for scales and offsets as
    codes with a factor per row; each plane's scale is then rounded by itself."""

    weight_bits: int = 4
    group_size: int = 128
    norm: float = 0.7
    rounds: int = 20
    scale_bits: int = 16

    def __post_init__(self) -> None:
        check_weight_bits(self.weight_bits)
        check_group_size(self.group_size)
        check_scale_bits(self.scale_bits)
        if not 0 < self.norm <= 1:
            raise RecipeError(f"norm is {self.norm}; choose p of the loss in 0..1, for example 0.7")
        if self.rounds < 0:
            raise RecipeError(f"rounds is {self.rounds}; choose 0 or more")


def stored_specs(settings: HqqSettings, _shape: Shape) -> tuple[BcqSpec]:
    """What these settings store a weight as."""
    return (BcqSpec(settings.weight_bits, settings.group_size, True, settings.scale_bits),)


def quantize(layer: LayerInput, settings: HqqSettings) -> PackedWeight:
    """Round each group to the levels of its half-quadratic grid; statistics and Hessian are not used."""

    def fit(values: Tensor, _importance: Tensor) -> UniformGrid:
        return fit_half_quadratic(values, settings.weight_bits, norm=settings.norm, rounds=settings.rounds)

    shape = CodeShape(settings.weight_bits, settings.group_size, settings.scale_bits)
    equal = torch.ones(layer.weight.shape[1], device=layer.weight.device)
    return code_groups(layer.weight, equal, shape, fit).pack(layer, shape, offset=True)


def fit_half_quadratic(values: Tensor, bits: int, *, norm: float, rounds: int) -> UniformGrid:
    """The grid of each group with the least sum |error|^norm over the rounds; the first is minimum to maximum.

    values: [G, g] fp32.
    """
    grid = best = fit_uniform(values, torch.ones_like(values), bits, symmetric=False, clip=False)
    least, unit = _loss(values, grid, norm), 2 * grid.half_step[:, None]
    for step in range(rounds):
        codes, levels = grid.encode(values)
        given_up = soft_threshold((values - levels) / unit, norm, _FIRST_PENALTY * _PENALTY_GROWTH**step) * unit
        grid = _least_squares(values - given_up, codes, grid)
        loss = _loss(values, grid, norm)
        better = loss < least
        least = torch.where(better, loss, least)
        half_step = torch.where(better, grid.half_step, best.half_step)
        best = UniformGrid(half_step, torch.where(better, grid.offset, best.offset), bits)
    return best


def soft_threshold(residual: Tensor, norm: float, penalty: float) -> Tensor:
    """sign(r) * max(0, |r| - |r|^(norm - 1) / penalty), elementwise: where |e|^norm / norm + (penalty / 2) (r - e)^2 is
    least, to first order in 1 / penalty; exact for norm 1."""
    magnitude = residual.abs()
    return residual.sign() * (magnitude - magnitude.pow(norm - 1) / penalty).clamp_min_(0)


def _least_squares(target: Tensor, codes: Tensor, last: UniformGrid) -> UniformGrid:
    """The grid nearest to target [G, g] for fixed codes: a line through (2 code - top, target) per group.

    A group whose codes are all equal keeps its step: any line goes through one point.
    """
    signed = codes.float() * 2 - (2**last.bits - 1)
    mean, centre = signed.mean(dim=-1, keepdim=True), target.mean(dim=-1, keepdim=True)
    spread = (signed - mean).square_().sum(dim=-1)
    slope = ((signed - mean) * (target - centre)).sum(dim=-1) / spread.clamp_min(1)
    half_step = torch.where(spread > 0, slope, last.half_step).half().float().clamp_min(SMALLEST_SCALE)
    offset = (target - half_step[:, None] * signed).mean(dim=-1)
    return UniformGrid(half_step, offset.half().float(), last.bits)


def _loss(values: Tensor, grid: UniformGrid, norm: float) -> Tensor:
    return (grid.encode(values)[1] - values).abs_().pow_(norm).sum(dim=-1)
