"""Columns of a weight in the trellis format as the kernels choose them: quantizers/trellis/viterbi.py is their twin."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.cuda.launch import Launch
from quantkit.formats.trellis import BLOCK_ROWS
from quantkit.ops.solve.instances import (
    MOST_COLUMNS,
    branches_bytes,
    trellis_scratch,
    trellis_threads,
    trellis_unit,
)

_MOST_BLOCKS = 2048  # of a launch: each notes down up to 128 KB


@dataclass(frozen=True, eq=False)
class RowCode:
    """What the codes of a row count in: scales [N] fp32, and filter [q, taps] fp32 of them all.

    importance: [N] fp32, of the squared error of a row in units of its scale.
    """

    scales: Tensor
    importance: Tensor
    filter: Tensor

    @classmethod
    def of(cls, scales: Tensor, filter: Tensor) -> RowCode:
        """Where squared errors of all rows count alike."""
        return cls(scales, (scales / scales.max()).square(), filter)

    @property
    def states(self) -> int:
        """Of the trellis, between two rows."""
        bits, taps = self.filter.shape
        return 1 << (bits * (taps - 1))


def code_columns(values: Tensor, rows: RowCode) -> Tensor:
    """Codes [C, N] uint8 nearest to values [C, N]."""
    at_once = MOST_COLUMNS * max(1, _MOST_BLOCKS // -(-values.shape[1] // BLOCK_ROWS))
    return torch.cat([_columns(part, rows, None, None)[0] for part in values.split(at_once)])


def round_columns(values: Tensor, factor: Tensor, rows: RowCode) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ over columns [C, N], at most 64: (codes uint8, levels, errors), [C, N] each.

    factor: [C, C], of the inverse Hessian, upper.
    """
    return _columns(values, rows, factor, None)


def descend_columns(pressure: Tensor, old: Tensor, hessian: Tensor, rows: RowCode) -> tuple[Tensor, Tensor]:
    """Cyclic descent over columns, at most 64: codes [C, N] uint8, and what each level moved by from ``old`` [C, N].

    pressure: [C, N], of (W - W') H. hessian: [C, C].
    """
    codes, _, moved = _columns(pressure, rows, hessian, old)
    return codes, moved


def _columns(values: Tensor, rows: RowCode, matrix: Tensor | None, old: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    values, (columns, n) = values.contiguous(), values.shape
    codes, stored = torch.empty_like(values, dtype=torch.uint8), torch.empty_like(values)
    moves = torch.empty_like(values) if matrix is not None else None
    assert matrix is None or columns <= MOST_COLUMNS
    if matrix is not None and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    grid = -(-n // BLOCK_ROWS), -(-columns // MOST_COLUMNS)
    scratch = None
    if trellis_scratch(rows.states):
        scratch = torch.empty(grid[0] * grid[1] * branches_bytes(rows.states), dtype=torch.uint8, device=values.device)
    bits, taps = rows.filter.shape
    Launch(
        trellis_unit(bits, taps),
        values.device,
        grid=grid,
        block=trellis_threads(rows.states),
        args={
            "values": values,
            "old": None if old is None else old.contiguous(),
            "matrix": matrix,
            "scales": rows.scales,
            "importance": rows.importance,
            "filter": rows.filter,
            "stored": stored,
            "moves": moves,
            "codes": codes,
            "scratch": scratch,
            "N": n,
            "C": columns,
            "matrixStride": 0 if matrix is None else matrix.stride(0),
        },
    ).run()
    return codes, stored, values.new_empty(0) if moves is None else moves
