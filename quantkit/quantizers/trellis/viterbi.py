"""The signs of least squared error of columns in the trellis format, by the Viterbi algorithm.

A block of rows is a path through a trellis: the state behind row n is the bits of rows n - taps + 2 .. n, a step adds
the q bits of the next row, and the weight of that row is a sum over all bits of state and step. The path of least cost
is found exactly. Blocks are rings, so a path has to end in the state that it began with: a first pass goes round twice,
from any state to any, and gives the state between its turns; a second pass finds the best path round through it.
Source: Viterbi 1967; tail-biting as in QTIP (Tseng et al. 2024, algorithm 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantkit.formats.trellis import BLOCK_ROWS
from quantkit.ops.solve.trellis import RowCode

Array = npt.NDArray[Any]

_MOST_COSTS = 1 << 24  # branch costs that are held at once


@dataclass(frozen=True, eq=False)
class Trellis:
    """values [2**(q * taps)] fp32: the weight of every window of bits. The lowest q bits are those of the row itself,
    plane i in bit i; the next q those of the row before."""

    values: Tensor
    weight_bits: int

    @classmethod
    def of(cls, filter: Tensor) -> Trellis:
        """The trellis of a filter [q, taps] fp32."""
        bits, taps = filter.shape
        windows = torch.arange(2 ** (bits * taps), device=filter.device)
        values = torch.zeros(len(windows), device=filter.device)
        for d in range(taps):
            for i in range(bits):
                values += filter[i, d] * (((windows >> (d * bits + i)) & 1) * 2 - 1)
        return cls(values, bits)

    @property
    def states(self) -> int:
        """States between two rows."""
        return len(self.values) >> self.weight_bits


def code_columns(values: Tensor, rows: RowCode) -> Tensor:
    """Codes [C, N] uint8 nearest to values [C, N] fp32, ring by ring of every column."""
    return _code_columns(values, rows)[0]


def round_columns(values: Tensor, factor: Tensor, rows: RowCode) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ over columns [C, N]: (codes uint8, levels, errors), [C, N] each.

    factor: [C, C], of the inverse Hessian, upper.
    """
    left = values.clone()
    codes, stored, errors = torch.empty_like(left, dtype=torch.uint8), torch.empty_like(left), torch.empty_like(left)
    for i in range(len(left)):
        codes[i : i + 1], stored[i : i + 1] = _code_columns(left[i : i + 1], rows)
        errors[i] = (left[i] - stored[i]) / factor[i, i]
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return codes, stored, errors


def descend_columns(pressure: Tensor, old: Tensor, hessian: Tensor, rows: RowCode) -> tuple[Tensor, Tensor]:
    """Cyclic descent over columns: codes [C, N] uint8, and what each level moved by from ``old`` [C, N].

    pressure: [C, N], of (W - W') H. hessian: [C, C].
    """
    left = pressure.clone()
    codes, moved = torch.empty_like(left, dtype=torch.uint8), torch.empty_like(left)
    for i in range(len(left)):
        codes[i : i + 1], level = _code_columns((old[i] + left[i] / hessian[i, i])[None], rows)
        moved[i] = level[0] - old[i]
        left[i + 1 :].addr_(hessian[i, i + 1 :], moved[i], alpha=-1)
    return codes, moved


def _code_columns(values: Tensor, rows: RowCode) -> tuple[Tensor, Tensor]:
    """Codes and levels, [C, N] each, nearest to ``values``."""
    trellis, targets = Trellis.of(rows.filter), values / rows.scales
    codes, units = torch.empty_like(values, dtype=torch.uint8), torch.empty_like(values)
    columns, n = values.shape
    whole = n - n % BLOCK_ROWS
    for first, stop, ring in ((0, whole, BLOCK_ROWS), (whole, n, n % BLOCK_ROWS)):
        if first == stop:
            continue
        rings = targets[:, first:stop].reshape(-1, ring)  # [C * rings, ring]
        importance = rows.importance[first:stop].view(1, -1, ring).expand(columns, -1, ring).reshape(-1, ring)
        at_once = max(1, _MOST_COSTS // (len(trellis.values) * ring))
        parts = [
            _code_rings(part, weight, trellis)
            for part, weight in zip(rings.split(at_once), importance.split(at_once), strict=True)
        ]
        for into, found in zip((codes, units), zip(*parts, strict=True), strict=True):
            into[:, first:stop] = torch.cat(found).view(columns, -1)
    return codes, units * rows.scales


def _code_rings(values: Tensor, weights: Tensor, trellis: Trellis) -> tuple[Tensor, Tensor]:
    """Codes and what they stand for, [B, R] each, of rings of R rows."""
    ring, bits = values.shape[1], trellis.weight_bits
    costs = _branch_costs(values, weights, trellis)
    came, last = _forward(np.concatenate([costs, costs]), trellis, None)
    state = last.argmin(axis=1)
    for step in reversed(range(ring, 2 * ring)):
        state = _window(came[step], state, trellis) >> bits
    came, _ = _forward(costs, trellis, state)
    windows = np.empty(values.shape, dtype=np.int64)
    for row in reversed(range(ring)):
        windows[:, row] = _window(came[row], state, trellis)
        state = windows[:, row] >> bits
    found = torch.from_numpy(windows).to(values.device)
    return (found & (2**bits - 1)).to(torch.uint8), trellis.values[found]


def _branch_costs(values: Tensor, weights: Tensor, trellis: Trellis) -> Array:
    """[R, B, windows] fp32: weight * (value - 2 x) * value, the squared error of a row but for a constant."""
    windows = trellis.values.cpu().numpy()
    x, weight = (tensor.t().unsqueeze(-1).cpu().numpy() for tensor in (values, weights))  # [R, B, 1]
    costs: Array = (windows - 2 * x) * windows
    costs *= weight
    return costs


def _forward(costs: Array, trellis: Trellis, start: Array | None) -> tuple[Array, Array]:
    """For every row [R] and state behind it the highest q bits of its best window, and the costs [B, states] at last.

    start: [B], the only state to begin with; None: any. In NumPy: thousands of small steps, of which none is worth a
    second thread.
    """
    (steps, rings, _), states, branches = costs.shape, trellis.states, 2**trellis.weight_bits
    total = np.zeros((rings, states), dtype=np.float32)
    if start is not None:
        total[:] = np.inf
        total[np.arange(rings), start] = 0
    came = np.zeros((steps, rings, states), dtype=np.uint8)
    through, better = np.empty_like(total), np.empty(total.shape, dtype=bool)
    for cost, won in zip(costs.reshape(steps, rings, branches, states), came, strict=True):
        before = total.reshape(rings, branches, states // branches).repeat(branches, axis=2)
        np.add(cost[:, 0], before[:, 0], out=total)
        for branch in range(1, branches):
            np.add(cost[:, branch], before[:, branch], out=through)
            np.less(through, total, out=better)
            np.copyto(won, branch, where=better)
            np.minimum(total, through, out=total)
    return came, total


def _window(came: Array, state: Array, trellis: Trellis) -> Array:
    """The best window [B] that leads to ``state``."""
    highest: Array = came[np.arange(len(state)), state].astype(np.int64)
    return highest * trellis.states + state
