"""Many small systems of linear equations at once."""

from __future__ import annotations

import torch
from torch import Tensor


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve many small symmetric positive definite systems at once: [G, U, U], [G, U] -> [G, U].

    LDL^T without pivoting, vectorized over G: thousands of 5 x 5 systems take longer to dispatch one by one.
    """
    size = matrix.shape[-1]
    rows = [[matrix[:, i, j] for j in range(size)] for i in range(size)]
    values = [right[:, i] for i in range(size)]
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = rows[row][pivot] / rows[pivot][pivot]
            for column in range(pivot + 1, size):
                rows[row][column] = rows[row][column] - factor * rows[pivot][column]
            values[row] = values[row] - factor * values[pivot]
    for row in reversed(range(size)):
        for column in range(row + 1, size):
            values[row] = values[row] - rows[row][column] * values[column]
        values[row] = values[row] / rows[row][row]
    return torch.stack(values, dim=-1)
