"""GPTQ: round a weight column by column, moving each column's error to the columns not yet rounded.

Source: Frantar et al. 2022, algorithm 1. What "round" means is the caller's: a fixed grid, a scale per tensor, levels
refitted per group. FlattenQuant-O3, round-to-nearest and binary coding share this one loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError

RoundColumn = Callable[[int, Tensor], Tensor]
"""(column index, values [N] fp32) -> the values [N] that the format stores for them."""
RoundBlock = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(first column index, values [C, N], factor [C, C] of the inverse Hessian) -> (what the format stores for them, what
is left of each column before it is divided among those behind), [C, N] each: the loop over a block, in one step."""

_DAMPING_STEP = 10.0
_DAMPING_TRIES = 6


@dataclass(frozen=True)
class GptqOptions:
    """damping: share of the mean diagonal of H added to its diagonal, > 0; raised tenfold while H is not definite.
    act_order: round columns of large H[k, k] first. block_columns: columns between two updates of the rest."""

    damping: float = 0.01
    act_order: bool = False
    block_columns: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1:
            raise RecipeError(
                f"damping is {self.damping}; choose a share of the Hessian's diagonal in 0..1, for example 0.01"
            )


@dataclass(frozen=True)
class InverseFactor:
    """upper: [K, K], upper triangular U with U^T U = H^-1, H damped. damping: the share that was needed."""

    upper: Tensor
    damping: float


@dataclass(frozen=True)
class GptqResult:
    """weight: [N, K] fp32, every value one that round_column returned, columns in their own order.
    damping: the share that was needed."""

    weight: Tensor
    damping: float


def gptq(
    weight: Tensor,
    hessian: Tensor | InverseFactor,
    round_column: RoundColumn | None,
    *,
    options: GptqOptions,
    round_block: RoundBlock | None = None,
) -> GptqResult:
    """Round weight [N, K] so that tr((W - W') H (W - W')^T) stays small; H [K, K] is E[x x^T].

    hessian: H, or its factor where that is known; the columns then go in their own order.
    round_column: called once per column, in the order of the columns, or of falling H[k, k] with act_order.
    round_block: in place of round_column, which may then be None, for columns in their own order.
    Columns that no input reaches (H[k, k] = 0) are rounded as they are and take no part in the compensation.
    Raises StatsError where H is not finite, or not positive definite at any damping.
    """
    if isinstance(hessian, InverseFactor):
        order, known = torch.arange(weight.shape[1], device=weight.device), hessian
    else:
        order = _column_order(hessian, options.act_order)
        known = inverse_factor(hessian[order][:, order], options.damping)
    factor = known.upper
    rows = weight.t()[order].contiguous()  # [K, N]: a column of W is contiguous
    columns = order.tolist() if round_block is None else []  # a GPU's would be waited for
    for start in range(0, len(order), options.block_columns):
        stop = min(start + options.block_columns, len(order))
        if round_block is not None:
            rows[start:stop], errors = round_block(start, rows[start:stop], factor[start:stop, start:stop])
            rows[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
            continue
        errors = torch.empty_like(rows[start:stop])
        for i in range(start, stop):
            exact = rows[i].clone()
            assert round_column is not None
            rows[i] = round_column(columns[i], exact)
            errors[i - start] = (exact - rows[i]) / factor[i, i]
            rows[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[i - start], alpha=-1)
        rows[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1)
    result = torch.empty_like(weight)
    result[:, order] = rows.t()
    return GptqResult(result, known.damping)


def inverse_factor(hessian: Tensor, damping: float) -> InverseFactor:
    """U [K, K] with U^T U = (H + damping * mean(diag H) * I)^-1, and the damping that was needed.

    Unreached columns (diagonal 0) get the mean diagonal, so that they stay apart from all others.
    Raises StatsError where H holds NaN or Inf, or no damping up to 10^5 times the given one makes it definite.
    """
    if not torch.isfinite(hessian).all():
        raise StatsError("its Hessian holds NaN or Inf: the model overflows on the calibration text")
    diagonal = hessian.diagonal()
    mean = diagonal.mean().item() or 1.0
    filled = torch.where(diagonal > 0, diagonal, mean)
    share = damping
    for _ in range(_DAMPING_TRIES):
        damped = hessian.clone()
        damped.diagonal().copy_(filled + share * mean)
        upper = (_reversed_factor if damped.is_cuda else _factor_of_inverse)(damped)
        if upper is not None and torch.isfinite(upper).all():
            return InverseFactor(upper, share)
        share *= _DAMPING_STEP
    raise StatsError(f"its Hessian is not positive definite even with damping {share / _DAMPING_STEP:g}")


def _factor_of_inverse(damped: Tensor) -> Tensor | None:
    """U of inverse_factor, or None where the matrix is not positive definite."""
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    return None if failed else upper


def _reversed_factor(damped: Tensor) -> Tensor | None:
    """The same U, rows contiguous, by half the operations: H with rows and columns reversed is L L^T, and U is L^-1
    reversed."""
    lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
    if failed:
        return None
    identity = torch.eye(len(damped), dtype=damped.dtype, device=damped.device)
    return torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1).contiguous()


def _column_order(hessian: Tensor, act_order: bool) -> Tensor:
    if act_order:
        return torch.argsort(hessian.diagonal(), descending=True, stable=True)
    return torch.arange(hessian.shape[0], device=hessian.device)
