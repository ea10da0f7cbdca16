"""Binary-coding quantization: w ~ sum_i scale_i * sign_i + offset per group, scales and signs chosen together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.formats.bcq import BcqSpec, check_group_size, check_scale_bits, check_weight_bits
from quantkit.formats.hadamard import block_width
from quantkit.ops.solve.op import FitOptions, fit_groups
from quantkit.quantizers.base import ACTIVATIONS, LayerInput, check_hessian_kind, check_rotate
from quantkit.quantizers.bcq.coding import CodeShape, code_groups
from quantkit.quantizers.bcq.compensation import Refining, compensate, refine
from quantkit.quantizers.bcq.groups import weighted_error
from quantkit.quantizers.bcq.levels import Coding, Nearest, sign_table
from quantkit.quantizers.bcq.systems import solve_positive
from quantkit.quantizers.gptq import GptqOptions
from quantkit.quantizers.rotated_inputs import quantize_rotated
from quantkit.quantizers.rounding import CLIP_STEPS, CLIPS, fit_uniform

# Pull towards the last round's scales, as a share of the mean diagonal: it makes the normal equations of two equal
# planes solvable and moves the exact solution of regular ones by less than fp16 resolves.
_PROXIMAL = 1e-6
# A group is done when a round lowers its error by less than this share.
_STOP_GAIN = 1e-3


@dataclass(frozen=True)
class BcqSettings:
    """weight_bits: q, planes, 1-8. group_size: g, columns per scale, -1 for the row. offset: store a constant per
    group. rounds: upper limit of alternations between scales and signs. compensate: choose signs and scales against
    E[x x^T] of the calibration text instead of its diagonal, GPTQ first, then ``sweeps`` rounds of descent.
    group_sweeps: such rounds of each group during GPTQ, before what it leaves moves to the columns behind.
    damping: share of each diagonal element of E[x x^T] added to it. scale_bits: 16, or 8 for scales and offsets as
    codes with a factor per row. rotate: true folds a Hadamard rotation of the residual stream into the weights first;
    online also one of the heads' values, and rotates what flows into the FFN's last Linear as the model runs.
    rotate_inputs: rotate the input of this Linear as the model runs, by Hadamard blocks; any family.
    hessian: activations, E[x x^T], or end_loss, E[g^2 x x^T], g the gradient of the end loss at the Linear's output."""

    weight_bits: int = 4
    group_size: int = 128
    offset: bool = True
    rounds: int = 15
    compensate: bool = False
    sweeps: int = 3
    group_sweeps: int = 0
    damping: float = 0.5
    scale_bits: int = 16
    rotate: bool | str = False
    rotate_inputs: bool = False
    hessian: str = ACTIVATIONS

    def __post_init__(self) -> None:
        check_weight_bits(self.weight_bits)
        check_group_size(self.group_size)
        check_scale_bits(self.scale_bits)
        if self.rounds < 0:
            raise RecipeError(f"rounds is {self.rounds}; choose 0 or more")
        if self.sweeps < 0:
            raise RecipeError(f"sweeps is {self.sweeps}; choose 0 or more")
        if self.group_sweeps < 0:
            raise RecipeError(f"group_sweeps is {self.group_sweeps}; choose 0 or more")
        if self.group_sweeps and not self.compensate:
            raise RecipeError(
                f"group_sweeps is {self.group_sweeps}: groups are refined in compensation; set compensate: true"
            )
        check_rotate(self.rotate)
        check_hessian_kind(self.hessian, used=self.compensate)
        GptqOptions(damping=self.damping)


def stored_specs(settings: BcqSettings, shape: Shape) -> tuple[BcqSpec]:
    """What these settings store a weight as. Raises RecipeError for inputs that cannot be rotated."""
    if settings.rotate_inputs:
        block_width(shape[1])
    bits, group_size = settings.weight_bits, settings.group_size
    return (BcqSpec(bits, group_size, settings.offset, settings.scale_bits, settings.rotate_inputs),)


def needs_hessian(settings: BcqSettings) -> bool:
    """Whether quantize wants LayerInput.hessian."""
    return settings.compensate


def greedy(values: Tensor, importance: Tensor, bits: int, *, offset: bool) -> Coding:
    """Plane after plane on what the planes before left over (Guo et al. 2017): sign, then mean |residual|.

    values, importance: [G, g].
    """
    mass = importance.sum(dim=-1)
    start = (values * importance).sum(dim=-1) / mass if offset else torch.zeros_like(mass)
    residual = values - start[:, None]
    scales = []
    for _ in range(bits):
        scale = (residual.abs() * importance).sum(dim=-1) / mass
        residual = residual - torch.where(residual >= 0, scale[:, None], -scale[:, None])
        scales.append(scale)
    return Coding(torch.stack(scales), start)


def refit_scales(values: Tensor, importance: Tensor, nearest: Nearest, last: Coding, *, offset: bool) -> Coding:
    """The scales (and offset) of least weighted squared error for fixed signs: the exact normal equations.

    values, importance: [G, g]. Weights with one code share one row of the design, so the sums per code are enough:
    2**q rows instead of g. Source: Xu et al. 2018, Eq 3; nuQmm Eq 1.
    """
    bits = last.scales.shape[0]
    table = sign_table(last.scales)
    basis = torch.cat([table, torch.ones_like(table[:1])]) if offset else table  # [U, 2**q]
    outer = (basis[:, None, :] * basis[None, :, :]).flatten(0, 1)  # [U * U, 2**q]
    gram = (nearest.sum_by_code(importance) @ outer.t()).unflatten(-1, (len(basis), len(basis)))
    right = nearest.sum_by_code(values * importance) @ basis.t()
    before = torch.cat([last.scales, last.offset[None]] if offset else [last.scales]).t()
    pull = _PROXIMAL * importance.sum(dim=-1)
    gram.diagonal(dim1=1, dim2=2).add_(pull[:, None])
    solution = solve_positive(gram, right + pull[:, None] * before).t()
    return Coding(solution[:bits], solution[bits] if offset else last.offset)


def alternate(values: Tensor, importance: Tensor, start: Coding, rounds: int, *, offset: bool) -> tuple[Coding, Tensor]:
    """Alternate between nearest codes and refitted scales until no group gains (Xu et al. 2018, algorithm 2).

    Returns the coding of least error seen per group, as stored in fp16, and that error [G].
    """
    current = start.stored()
    best = Coding(current.scales.clone(), current.offset.clone())  # written to below
    nearest = current.nearest(values)
    least = weighted_error(nearest.levels(), values, importance)
    active = torch.arange(values.shape[0], device=values.device)
    for _ in range(rounds):
        current = refit_scales(values, importance, nearest, current, offset=offset).stored()
        nearest = current.nearest(values)
        error = weighted_error(nearest.levels(), values, importance)
        better = error < least[active]
        going_on = error < least[active] * (1 - _STOP_GAIN)
        best.scales[:, active[better]] = current.scales[:, better]
        best.offset[active[better]] = current.offset[better]
        least[active[better]] = error[better]
        if not going_on.any():
            break
        active, current, nearest = active[going_on], current.select(going_on), nearest.select(going_on)
        values, importance = values[going_on], importance[going_on]
    return best, least


def solve_groups(values: Tensor, importance: Tensor, settings: BcqSettings) -> Coding:
    """The better of two alternations per group, one from the greedy start, one from clipped round-to-nearest.

    values, importance: [G, g] fp32. Never worse in weighted error than the clipped round-to-nearest it started from.
    """
    bits, offset = settings.weight_bits, settings.offset
    if values.is_cuda:
        options = FitOptions(settings.rounds, CLIPS, CLIP_STEPS, _PROXIMAL, _STOP_GAIN)
        return Coding(*fit_groups(values, importance, bits, offset=offset, options=options))
    grid = fit_uniform(values, importance, bits, symmetric=not offset, clip=True)
    starts = [Coding(grid.scales, grid.offset), greedy(values, importance, bits, offset=offset)]
    (best, least), (other, error) = (alternate(values, importance, s, settings.rounds, offset=offset) for s in starts)
    better = error < least
    return Coding(
        torch.where(better, other.scales, best.scales),
        torch.where(better, other.offset, best.offset),
    )


def quantize(layer: LayerInput, settings: BcqSettings) -> PackedWeight:
    """Binary-coding of every group of a weight, its squared error weighted by E[x^2] where statistics are given.

    Raises StatsError naming the layer where compensation meets a Hessian that cannot be inverted.
    """
    if settings.rotate_inputs:
        return quantize_rotated(layer, settings, quantize)

    def fit(values: Tensor, importance: Tensor) -> Coding:
        return solve_groups(values, importance, settings)

    shape = CodeShape(settings.weight_bits, settings.group_size, settings.scale_bits)
    if settings.compensate:
        refining = Refining(settings.group_sweeps, settings.offset)
        start, hessian = compensate(layer, shape, fit, damping=settings.damping, refining=refining)
        coding = refine(layer.weight, hessian, start, sweeps=settings.sweeps, offset=settings.offset)
    else:
        coding = code_groups(layer.weight, layer.importance(), shape, fit)
    return coding.pack(layer, shape, offset=settings.offset)
