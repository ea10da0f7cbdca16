"""Codes chosen against the Hessian E[x x^T]: GPTQ's order first, then descent on codes and scales in turn.

Sources: Frantar et al. 2022 (GPTQ: each column's error is moved to the columns behind it); Behdin et al. 2023
(QuantEase: cyclic coordinate descent on the same loss); Chen et al. 2026 (BPDQ, arXiv 2602.04163: planes and scales of
a group refined against its part of the inverse Hessian while errors move on). The refit of scales against the whole
row's Hessian is our own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantkit.errors import StatsError
from quantkit.formats.bcq import group_width
from quantkit.formats.planes import code_signs
from quantkit.ops.solve.op import round_columns
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import kernels
from quantkit.quantizers.bcq.coding import Coder, CodeShape, FitGroup, GroupCodes
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.scales import ScaleGrid, roomy_grid
from quantkit.quantizers.bcq.systems import solve_positive
from quantkit.quantizers.gptq import GptqOptions, InverseFactor, gptq, inverse_factor

# Pull of a scale refit towards the scales it starts from, as a share of the mean diagonal of its normal equations.
_PROXIMAL = 1e-4
_BLOCK_COLUMNS = 64
# What 8-bit scales may grow by over the fp16 ones that their factors were taken from.
_ROOM = 1.15
# Share of the mean diagonal that goes on top, for what is singular without it; raised where that is not enough.
_LEAST_DAMPING = 1e-6
_MEMO = "compensation"


@dataclass(frozen=True)
class Refining:
    """How a group is refined before its errors move on. sweeps: see ``refine``. offset: whether the format has one."""

    sweeps: int
    offset: bool


UNREFINED = Refining(0, offset=True)


def compensate(
    layer: LayerInput, shape: CodeShape, fit: FitGroup, *, damping: float, refining: Refining = UNREFINED
) -> tuple[GroupCodes, Tensor]:
    """Code a weight [N, K] column by column, the levels of each group fitted to what compensation has made of it.

    Groups of large inputs come first, and large inputs first in each group. The importance of column k in a fit is
    1 / U[k, k]^2, U^T U = H^-1: what an error there still costs after the columns behind it have made up for it, which
    is the loss that this order minimizes. 8-bit scales are rounded before
    their group's codes are chosen, so that compensation makes up for their rounding too. refining: of each group then.
    Returns the codes and the damped Hessian.
    Raises StatsError naming the layer where its Hessian is not finite or not positive definite at any damping.
    """
    if layer.hessian is None:
        raise StatsError(f"{layer.name}: compensation needs a Hessian; pass a calibration artifact")
    found = ordered_hessian(layer, group_width(shape.group_size, layer.weight.shape[1]), damping)
    weight = layer.weight[:, found.order.columns]
    coded = shape.coded_scales
    coding = _code_in_order(weight, found.factor, shape, fit, ScaleGrid(), UNREFINED if coded else refining)
    if coded:  # the factors must be there before the first group: once more, with those of the fp16 scales
        grid = roomy_grid(coding.scales, coding.offset, _ROOM)
        coding = _code_in_order(weight, found.factor, shape, fit, grid, refining)
    return found.order.restored(coding), found.damped


@dataclass(frozen=True)
class OrderedHessian:
    """A Hessian for groups of one width. damped: in the weight's order of columns. factor: in ``order``."""

    width: int
    damping: float
    order: Order
    damped: Tensor
    factor: InverseFactor


def ordered_hessian(layer: LayerInput, width: int, damping: float) -> OrderedHessian:
    """The layer's Hessian for such groups, factored once for all bit widths that are tried one after the other."""
    assert layer.hessian is not None
    known: OrderedHessian | None = layer.memo.get(_MEMO)
    if known is not None and (known.width, known.damping) == (width, damping):
        return known
    order = group_order(layer.hessian.diagonal(), width)
    damped = damp(layer.hessian, damping)
    try:
        factor = inverse_factor(damped[order.columns][:, order.columns], _LEAST_DAMPING)
    except StatsError as error:
        raise StatsError(f"{layer.name}: {error}") from error
    damped.diagonal().add_(factor.damping * (damped.diagonal().mean().item() or 1.0))
    layer.memo[_MEMO] = OrderedHessian(width, damping, order, damped, factor)
    found: OrderedHessian = layer.memo[_MEMO]
    return found


@dataclass(frozen=True)
class Order:
    """columns [K] and groups [G]: the column and the group that come first, second, ..."""

    columns: Tensor
    groups: Tensor

    def restored(self, coding: GroupCodes) -> GroupCodes:
        """The codes of columns in this order, back in the weight's own."""
        columns, groups = self.columns.argsort(), self.groups.argsort()
        return replace(
            coding,
            codes=coding.codes[:, columns].contiguous(),
            scales=coding.scales[:, :, groups].contiguous(),
            offset=coding.offset[:, groups].contiguous(),
        )


def group_order(diagonal: Tensor, width: int) -> Order:
    """Groups of large inputs first, and large inputs first in each group, so that the small ones make up for them.

    A group at the end that is narrower stays there. Source: GPTQ's activation order, kept within groups.
    """
    whole = diagonal.numel() // width
    sums = diagonal[: whole * width].view(whole, width).sum(dim=1)
    groups = torch.argsort(sums, descending=True, stable=True)
    inner = torch.argsort(diagonal[: whole * width].view(whole, width), dim=1, descending=True, stable=True)
    columns = (groups[:, None] * width + inner[groups]).flatten()
    if whole * width < diagonal.numel():
        rest = torch.argsort(diagonal[whole * width :], descending=True, stable=True) + whole * width
        columns, groups = torch.cat([columns, rest]), torch.cat([groups, groups.new_tensor([whole])])
    return Order(columns, groups)


def _code_in_order(
    weight: Tensor, factor: InverseFactor, shape: CodeShape, fit: FitGroup, grid: ScaleGrid, refining: Refining
) -> GroupCodes:
    """Group after group: levels, codes, and what the group leaves of its values divided among the columns behind."""
    coding, left, columns = GroupCodes.empty(weight, shape, grid), weight.clone(), weight.shape[1]
    importance = factor.upper.diagonal().square().reciprocal()
    for group, first in enumerate(range(0, columns, coding.width)):
        span = slice(first, min(first + coding.width, columns))
        values, own = left[:, span].contiguous(), InverseFactor(factor.upper[span, span].contiguous(), factor.damping)
        weights = importance[span]
        levels = fit(values, (weights / weights.max()).expand(values.shape).contiguous())
        if grid.factors is not None:
            levels = _rounded_levels(levels, grid)
        found = _code_group(values, own, levels, grid)
        if refining.sweeps and coding.width < columns:  # a group that is the whole row is refined as such
            found = _refine_group(values, own, found, refining)
        coding.codes[:, span] = found.codes
        coding.scales[:, :, group], coding.offset[:, group] = found.scales[:, :, 0], found.offset[:, 0]
        if span.stop < columns:
            errors = torch.linalg.solve_triangular(own.upper, values - found.dequantize(), upper=True, left=False)
            left[:, span.stop :].addmm_(errors, factor.upper[span, span.stop :], alpha=-1)
    return coding


def _code_group(values: Tensor, factor: InverseFactor, levels: Coder, grid: ScaleGrid) -> GroupCodes:
    """Codes of one group [N, g] by GPTQ within it."""
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales, offset = levels.scales[:, :, None].contiguous(), levels.offset[:, None].contiguous()
    coding = GroupCodes(codes, scales, offset, values.shape[1], grid)

    def round_column(column: int, exact: Tensor) -> Tensor:
        found, nearest = levels.encode(exact[:, None])
        codes[:, column] = found[:, 0]
        return nearest[:, 0]

    def round_block(first: int, exact: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        return round_columns(exact, upper, kernels.columns_of(coding, slice(first, first + len(exact))))

    if values.is_cuda:
        options = GptqOptions(block_columns=kernels.block_columns(coding.width))
        gptq(values, factor, None, options=options, round_block=round_block)
    else:
        gptq(values, factor, round_column, options=GptqOptions(block_columns=_BLOCK_COLUMNS))
    return coding


def _refine_group(values: Tensor, factor: InverseFactor, start: GroupCodes, refining: Refining) -> GroupCodes:
    """Lower what the group's errors cost once the columns behind have made up for them: |(w - w') U_gg^-1|^2."""
    identity = torch.eye(len(factor.upper), device=values.device)
    inverse = torch.linalg.solve_triangular(factor.upper, identity, upper=True)
    return refine(values, inverse @ inverse.t(), start, sweeps=refining.sweeps, offset=refining.offset)


def _rounded_levels(coder: Coder, grid: ScaleGrid) -> Coding:
    """The levels of one group of every row, scales and offset rounded."""
    return Coding(grid.round_scales(coder.scales[..., None])[..., 0], grid.round_offset(coder.offset[:, None])[:, 0])


def damp(hessian: Tensor, damping: float) -> Tensor:
    """H + damping * diag H: correlations count for less, as those of a short calibration text are mostly noise.

    The limit of large damping is coding each group by itself with column k weighted by E[x_k^2].
    Deviation: GPTQ adds a share of the mean of diag H, which a few massive channels can make larger than all others'.
    """
    damped = hessian.clone()
    damped.diagonal().mul_(1 + damping)
    return damped


def refine(weight: Tensor, hessian: Tensor, start: GroupCodes, *, sweeps: int, offset: bool) -> GroupCodes:
    """Lower tr((W - W') H (W - W')^T) further: scales for fixed codes, then codes for fixed scales, ``sweeps`` times.

    hessian: [K, K], damped. offset: whether the format stores one. Every step is the exact minimum over what it
    changes, up to the rounding of scales; a result of higher loss than the start is discarded row by row.
    """
    if weight.is_cuda:
        return kernels.refine(weight, hessian, start, sweeps=sweeps, offset=offset, proximal=_PROXIMAL)
    current, best = start, start
    least = _row_loss(weight, hessian, start)
    for _ in range(sweeps):
        current = _refit_scales(weight, hessian, current, offset=offset)
        current = _descend_codes(weight, hessian, current)
        loss = _row_loss(weight, hessian, current)
        best, least = best.better_rows(least, current, loss)
    last = _refit_scales(weight, hessian, current, offset=offset)
    return best.better_rows(least, last, _row_loss(weight, hessian, last))[0]


def _row_loss(weight: Tensor, hessian: Tensor, coding: GroupCodes) -> Tensor:
    residual = weight - coding.dequantize()
    return ((residual @ hessian) * residual).sum(dim=1)


def _refit_scales(weight: Tensor, hessian: Tensor, start: GroupCodes, *, offset: bool) -> GroupCodes:
    """Group after group, the scales (and offset) of least loss for the codes at hand and the other groups' values.

    With B [N, U, g] the planes (and ones) of a group, the step solves (B H_gg B^T) d = B (R H)_g per row, R the
    residual of the whole row.
    """
    codes, scales, shift, grid = start.codes.clone(), start.scales.clone(), start.offset.clone(), start.grid
    pressure = (weight - start.dequantize()) @ hessian  # [N, K]
    for group, first in enumerate(range(0, weight.shape[1], start.width)):
        span = slice(first, min(first + start.width, weight.shape[1]))
        planes = code_signs(codes[:, span], start.bits)
        basis = torch.stack([*planes, torch.ones_like(planes[0])] if offset else planes, dim=1)  # [N, U, g]
        normal = ((basis @ hessian[span, span]) @ basis.transpose(1, 2)).double()
        diagonal = normal.diagonal(dim1=1, dim2=2)
        diagonal += _PROXIMAL * diagonal.mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny
        step = solve_positive(normal, (basis @ pressure[:, span, None]).double()[..., 0]).float()  # [N, U]
        before = torch.cat([scales[:, :, group], shift[:, group][None]] if offset else [scales[:, :, group]]).t()
        after = _rounded(grid, before + step, normal, start.bits)
        change = torch.einsum("nu,nug->ng", after - before, basis)
        turned = (after[:, : start.bits] < 0) & (grid.factors is not None)  # codes are not negative: opposite signs
        for i in range(start.bits):
            codes[:, span] ^= turned[:, i, None].to(torch.uint8) << i
        scales[:, :, group] = torch.where(turned, -after[:, : start.bits], after[:, : start.bits]).t()
        if offset:
            shift[:, group] = after[:, start.bits]
        pressure -= change @ hessian[span, :]
    return GroupCodes(codes, scales, shift, start.width, grid)


def _rounded(grid: ScaleGrid, wanted: Tensor, normal: Tensor, bits: int) -> Tensor:
    """Scales (and offset) [N, U] of one group of every row, rounded; negative scales stay negative.

    normal: [N, U, U]. Coded ones are rounded one by one, the last first, each where the loss has its minimum given
    those rounded before it (Babai's nearest plane): the errors of a group's few numbers make up for each other.
    """
    if grid.factors is None:
        return wanted.half().float()
    upper = torch.linalg.cholesky(normal, upper=True).float()
    rounded = torch.empty_like(wanted)
    for u in reversed(range(wanted.shape[1])):
        missing = ((wanted - rounded)[:, u + 1 :] * upper[:, u, u + 1 :]).sum(dim=1) / upper[:, u, u]
        best = (wanted[:, u] + missing)[:, None]
        nearest = grid.round_scales(best.abs()).copysign(best) if u < bits else grid.round_offset(best)
        rounded[:, u] = nearest[:, 0]
    return rounded


def _descend_codes(weight: Tensor, hessian: Tensor, start: GroupCodes) -> GroupCodes:
    """One sweep over the columns: each takes the level nearest to its optimum given all others (QuantEase, Eq 11)."""
    columns, values, codes = weight.shape[1], start.dequantize(), start.codes.clone()
    pressure = (weight - values) @ hessian
    diagonal = hessian.diagonal()
    for first in range(0, columns, _BLOCK_COLUMNS):
        stop = min(first + _BLOCK_COLUMNS, columns)
        moved = torch.zeros(stop - first, weight.shape[0], device=weight.device)
        for k in range(first, stop):
            if k % start.width == 0:
                group = k // start.width
                levels = Coding(start.scales[:, :, group], start.offset[:, group])
            residual = pressure[:, k] - hessian[first:k, k] @ moved[: k - first]
            found, nearest = levels.encode((values[:, k] + residual / diagonal[k])[:, None])
            moved[k - first] = nearest[:, 0] - values[:, k]
            values[:, k], codes[:, k] = nearest[:, 0], found[:, 0]
        pressure -= moved.t() @ hessian[first:stop]
    return GroupCodes(codes, start.scales, start.offset, start.width, start.grid)
