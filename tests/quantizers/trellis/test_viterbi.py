from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quantkit.formats.trellis import BLOCK_ROWS, filter_rows
from quantkit.ops.solve.trellis import RowCode
from quantkit.quantizers.trellis.filters import FILTERS, filter_for
from quantkit.quantizers.trellis.viterbi import Trellis, code_columns, descend_columns, round_columns

GAUSSIAN_ERROR = {(2, 4): 0.0800, (2, 6): 0.0771, (3, 3): 0.0212, (3, 5): 0.0193, (4, 2): 0.0062, (4, 4): 0.0050}
SCALAR_ERROR = {2: 0.1175, 3: 0.03454, 4: 0.009497}  # of the best q-bit quantizer of a Gaussian (Max 1960)
SAMPLING = 1.06  # of a mean over 16384 squares, and what closing the rings costs
FP32_ATOL = 1e-5  # sums of a few terms in another order
CLOSED = 1.1  # of the least cost: the state between last and first row is found first, and then kept


def _levels(codes: Tensor, rows: RowCode) -> Tensor:
    """[C, N], as the format defines them."""
    planes = [((codes.t() >> i) & 1).float() * 2 - 1 for i in range(len(rows.filter))]
    return filter_rows(torch.stack(planes), rows.filter).t() * rows.scales


def _cost(codes: Tensor, values: Tensor, rows: RowCode) -> Tensor:
    return (((_levels(codes, rows) - values) / rows.scales).square() * rows.importance).sum(dim=-1)


def test_a_window_stands_for_what_the_format_says() -> None:
    filter = torch.randn(2, 3)
    codes = torch.randint(0, 4, (1, BLOCK_ROWS), dtype=torch.uint8)
    windows = codes[0].long() | codes[0].roll(1).long() << 2 | codes[0].roll(2).long() << 4
    rows = RowCode.of(torch.ones(BLOCK_ROWS), filter)
    torch.testing.assert_close(Trellis.of(filter).values[windows], _levels(codes, rows)[0], atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize("taps", [2, 3])
def test_a_path_is_the_best_of_all(taps: int) -> None:
    """Against all 2**16 codes of rings of 16 rows with one bit; rows of unlike importance."""
    filter, n = torch.tensor([[0.8, -0.5, 0.3]])[:, :taps], 16
    rows, values = RowCode.of(torch.rand(n) + 0.5, filter), torch.randn(12, n)
    every = torch.tensor(list(itertools.product((0, 1), repeat=n)), dtype=torch.uint8)
    levels = _levels(every, rows)
    found = _cost(code_columns(values, rows), values, rows)
    least = torch.stack([(((levels - v) / rows.scales).square() * rows.importance).sum(dim=1).min() for v in values])
    assert bool((found >= least - FP32_ATOL).all())
    assert bool((found <= least * CLOSED).all())
    assert int((found <= least + FP32_ATOL).sum()) >= 9  # of 12; the others close their ring in another state


@pytest.mark.parametrize(("bits", "taps"), [f for f in FILTERS if f[0] * f[1] <= 12])
def test_filters_reach_their_error_on_a_gaussian(bits: int, taps: int) -> None:
    rows, values = RowCode.of(torch.ones(256), filter_for(bits, taps)), torch.randn(64, 256)
    error = (_levels(code_columns(values, rows), rows) - values).square().mean().item()
    assert error < GAUSSIAN_ERROR[bits, taps] * SAMPLING
    assert error < 0.75 * SCALAR_ERROR[bits]


def test_a_short_last_ring_is_coded_by_itself() -> None:
    rows, values = RowCode.of(torch.ones(BLOCK_ROWS + 16), filter_for(2, 4)), torch.randn(3, BLOCK_ROWS + 16)
    codes = code_columns(values, rows)
    alone = RowCode.of(torch.ones(16), filter_for(2, 4))
    assert torch.equal(codes[:, BLOCK_ROWS:], code_columns(values[:, BLOCK_ROWS:], alone))


def test_columns_are_rounded_as_gptq_rounds() -> None:
    """Each column's error over its diagonal goes to those behind it, times the factor's row."""
    rows, values = RowCode.of(torch.full((32,), 0.5), filter_for(3, 3)), torch.randn(5, 32)
    factor = torch.triu(torch.rand(5, 5)) + torch.eye(5)
    codes, levels, errors = round_columns(values, factor, rows)
    left = values.clone()
    for i in range(5):
        assert torch.equal(codes[i : i + 1], code_columns(left[i : i + 1], rows))
        error = (left[i] - _levels(codes[i : i + 1], rows)[0]) / factor[i, i]
        torch.testing.assert_close(errors[i], error, atol=FP32_ATOL, rtol=0)
        left[i + 1 :] -= factor[i, i + 1 :, None] * errors[i]
    torch.testing.assert_close(levels, _levels(codes, rows), atol=FP32_ATOL, rtol=0)


def test_descent_lowers_the_loss() -> None:
    rows, values = RowCode.of(torch.full((64,), 0.5), filter_for(2, 4)), torch.randn(6, 64)
    x = torch.randn(40, 6) @ torch.randn(6, 6)
    hessian = x.t() @ x / len(x)

    def loss(levels: Tensor) -> float:
        residual = values - levels
        return float((residual * (hessian @ residual)).sum())

    old = _levels(code_columns(values, rows), rows)
    codes, moved = descend_columns(hessian @ (values - old), old, hessian, rows)
    torch.testing.assert_close(old + moved, _levels(codes, rows), atol=FP32_ATOL, rtol=0)
    assert loss(old + moved) < 0.9 * loss(old)
