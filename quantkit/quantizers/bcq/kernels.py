"""What compensation.py does column by column and group by group, by kernels on a GPU: all rows of a weight at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quantkit.ops.solve import op
from quantkit.ops.solve.instances import MOST_COLUMNS
from quantkit.ops.solve.op import ColumnCodes
from quantkit.quantizers.bcq.coding import GroupCodes

_STRETCH = 512  # columns, at least a group, whose steps are taken to all other columns by one product


def block_columns(width: int) -> int:
    """Columns of a launch, so that none reaches from one group into the next."""
    return next(count for count in range(min(width, MOST_COLUMNS), 0, -1) if width % count == 0)


def columns_of(coding: GroupCodes, columns: slice) -> ColumnCodes:
    """Some columns of one group."""
    group = columns.start // coding.width
    return ColumnCodes(coding.codes[:, columns], coding.scales[:, :, group], coding.offset[:, group])


def refine(
    weight: Tensor, hessian: Tensor, start: GroupCodes, *, sweeps: int, offset: bool, proximal: float
) -> GroupCodes:
    """compensation.refine. (W - W') H [N, K] is kept up to date through all steps, so a row's loss takes no product."""
    current = replace(
        start, codes=start.codes.clone(), scales=start.scales.clone(), offset=start.offset.clone()
    )  # rewritten
    left = _residual(weight, current)
    pressure = left @ hessian
    best, least = start, _loss(left, pressure)
    for _ in range(sweeps):
        _refit_scales(hessian, pressure, current, offset=offset, proximal=proximal)
        _descend_codes(hessian, pressure, current)
        best, least = best.better_rows(least, current, _loss(_residual(weight, current), pressure))
    _refit_scales(hessian, pressure, current, offset=offset, proximal=proximal)
    return best.better_rows(least, current, _loss(_residual(weight, current), pressure))[0]


def _residual(weight: Tensor, coding: GroupCodes) -> Tensor:
    return op.residual(weight, coding.codes, coding.scales, coding.offset, coding.width)


def _loss(left: Tensor, pressure: Tensor) -> Tensor:
    """[N], of what is left of the weight and (W - W') H; ``left`` is overwritten."""
    return left.mul_(pressure).sum(dim=1)


def _refit_scales(hessian: Tensor, pressure: Tensor, coding: GroupCodes, *, offset: bool, proximal: float) -> None:
    """compensation._refit_scales; ``coding`` and ``pressure`` are rewritten."""

    def refit(span: slice, near: Tensor) -> Tensor:
        group = columns_of(coding, span)
        basis = op.signs(group.codes, group.bits, offset=offset)
        products = (basis.flatten(0, 1) @ hessian[span, span]).view_as(basis)
        return op.refit_scales(products, near, group, coding.grid.factors, proximal=proximal)

    _step_through(hessian, pressure, coding.width, coding.width, refit)


def _descend_codes(hessian: Tensor, pressure: Tensor, coding: GroupCodes) -> None:
    """compensation._descend_codes; ``coding`` and ``pressure`` are rewritten."""

    def descend(span: slice, near: Tensor) -> Tensor:
        return op.descend_columns(near, hessian[span, span], columns_of(coding, span)).t()

    _step_through(hessian, pressure, coding.width, block_columns(coding.width), descend)


def _step_through(
    hessian: Tensor, pressure: Tensor, width: int, count: int, step: Callable[[slice, Tensor], Tensor]
) -> None:
    """Take ``count`` columns after the other, each such span within a group of ``width``, and keep ``pressure`` [N, K].

    step: (span, (W - W') H of its columns [N, C]) -> what their values moved by [N, C]. A step is taken to the columns
    of its stretch at once, to all others at the stretch's end: a product of few columns is mostly reading and writing.
    """
    columns, stretch = hessian.shape[0], max(1, _STRETCH // width) * width
    for first in range(0, columns, stretch):
        last = min(first + stretch, columns)
        near, moved = pressure[:, first:last].clone(), []
        for start in range(first, last, count):
            span = slice(start, min(start + count, last))
            behind = slice(span.stop, last)
            moved.append(step(span, near[:, span.start - first : span.stop - first]))
            near[:, span.stop - first :].addmm_(moved[-1], hessian[span, behind], alpha=-1)
        pressure.addmm_(torch.cat(moved, dim=1), hessian[first:last], alpha=-1)
