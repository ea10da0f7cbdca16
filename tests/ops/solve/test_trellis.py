"""The kernel that chooses columns in the trellis format against its twin in PyTorch, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.trellis import BLOCK_ROWS, filter_rows
from quantkit.ops.solve import trellis as kernels
from quantkit.ops.solve.instances import MOST_COLUMNS, TRELLIS_FILTERS
from quantkit.ops.solve.trellis import RowCode
from quantkit.quantizers.trellis import viterbi
from quantkit.quantizers.trellis.filters import FILTERS, filter_for

# Costs are summed in another order, so of two paths of nearly one cost the other may win. A ring of 16 rows may then
# close in a far worse state, and columns behind it make up for another error.
COST_RTOL, LOSS_RTOL = 1e-3, 2e-2
SHORT_COST_RTOL, SHORT_LOSS_RTOL = 5e-2, 0.3
CLOSED = 1.03  # a ring, of 16 rows most of all, may close in a worse state than before
LEVEL_ATOL = 1e-5  # sums of up to 16 terms in another order
SHAPES = ((64, 3), (80, MOST_COLUMNS), (176, 33))  # N, C: whole rings, and a short last one


def test_every_filter_has_an_instance() -> None:
    assert set(FILTERS) == set(TRELLIS_FILTERS)


def _levels(codes: Tensor, rows: RowCode) -> Tensor:
    planes = [((codes.t() >> i) & 1).float() * 2 - 1 for i in range(len(rows.filter))]
    return filter_rows(torch.stack(planes), rows.filter).t() * rows.scales


def _problem(bits: int, taps: int, n: int, columns: int) -> tuple[Tensor, RowCode, Tensor]:
    scales = (torch.rand(n) * 0.05 + 0.01).half().float().cuda()
    x = torch.randn(4 * columns, columns).cuda()
    hessian = x.t() @ x / len(x) + 0.1 * torch.eye(columns).cuda()
    return torch.randn(columns, n).cuda() * scales, RowCode.of(scales, filter_for(bits, taps).cuda()), hessian


def _losses(values: Tensor, levels: Tensor, hessian: Tensor) -> Tensor:
    """By row [N]."""
    residual = values - levels
    return (residual * (hessian @ residual)).sum(dim=0)


def _assert_as_good(found: Tensor, twin: Tensor, rtol: float, short_rtol: float) -> None:
    """Of losses by row [N], of all whole rings and of the short one."""
    whole = len(found) - len(found) % BLOCK_ROWS
    for rows, tolerance in ((slice(whole), rtol), (slice(whole, None), short_rtol)):
        assert float(found[rows].sum()) == pytest.approx(float(twin[rows].sum()), rel=tolerance)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize(("bits", "taps"), TRELLIS_FILTERS)
@pytest.mark.parametrize(("n", "columns"), SHAPES)
def test_columns_by_themselves(bits: int, taps: int, n: int, columns: int) -> None:
    values, rows, _ = _problem(bits, taps, n, columns)
    found, twin = kernels.code_columns(values, rows), viterbi.code_columns(values, rows)

    def cost(codes: Tensor) -> Tensor:
        return (((_levels(codes, rows) - values) / rows.scales).square() * rows.importance).sum(dim=0)

    _assert_as_good(cost(found), cost(twin), COST_RTOL, SHORT_COST_RTOL)
    assert torch.equal(found, kernels.code_columns(values, rows))


@pytest.mark.cuda
@pytest.mark.parametrize(("bits", "taps"), TRELLIS_FILTERS)
@pytest.mark.parametrize(("n", "columns"), SHAPES)
def test_rounding_and_descent(bits: int, taps: int, n: int, columns: int) -> None:
    values, rows, hessian = _problem(bits, taps, n, columns)
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes, levels, errors = kernels.round_columns(values, factor, rows)
    _, twin, _ = viterbi.round_columns(values, factor, rows)
    torch.testing.assert_close(levels, _levels(codes, rows), atol=LEVEL_ATOL, rtol=0)
    first = _losses(values, levels, hessian)
    _assert_as_good(first, _losses(values, twin, hessian), LOSS_RTOL, SHORT_LOSS_RTOL)
    torch.testing.assert_close(values - levels, factor.t() @ errors, atol=1e-3, rtol=0)
    pressure = hessian @ (values - levels)
    codes, moved = kernels.descend_columns(pressure, levels, hessian, rows)
    _, other = viterbi.descend_columns(pressure, levels, hessian, rows)
    torch.testing.assert_close(levels + moved, _levels(codes, rows), atol=LEVEL_ATOL, rtol=0)
    second = _losses(values, levels + moved, hessian)
    assert float(second.sum()) <= float(first.sum()) * CLOSED
    _assert_as_good(second, _losses(values, levels + other, hessian), LOSS_RTOL, SHORT_LOSS_RTOL)
