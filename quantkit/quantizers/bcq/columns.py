"""Steps of compensation for a block of columns that lie in one group: the same operations whatever the values are.

A GPU replays each as one graph; on a CPU, where a launch costs nothing, the loops of compensation.py do the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.quantizers.replay import Replayed


def _round_columns(
    rows: Tensor, factor: Tensor, levels: Tensor, order: Tensor, middles: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ over columns [C, N]: (levels [C, N], errors [C, N], codes [C, N]).

    factor: [C, C], of the inverse Hessian. levels, order, middles: of each row's group, as Coding sorts them.
    """
    rows, errors, codes, stored = rows.clone(), [], [], []
    for i in range(len(rows)):
        rank = (rows[i, :, None] > middles).sum(dim=-1, keepdim=True)
        level = levels.gather(-1, rank)[:, 0]
        error = (rows[i] - level) / factor[i, i]
        rows[i + 1 :].addr_(factor[i, i + 1 :], error, alpha=-1)
        stored.append(level)
        errors.append(error)
        codes.append(order.gather(-1, rank)[:, 0])
    return torch.stack(stored), torch.stack(errors), torch.stack(codes)


def _descend_columns(
    pressure: Tensor,
    values: Tensor,
    hessian: Tensor,
    levels: Tensor,
    order: Tensor,
    middles: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cyclic descent over columns [N, C]: (values [N, C], codes [N, C], what each moved by [C, N]); hessian: [C, C]."""
    moved = torch.zeros_like(values.t())
    found, codes = [], []
    for k in range(values.shape[1]):
        residual = pressure[:, k] - hessian[:k, k] @ moved[:k]
        best = values[:, k] + residual / hessian[k, k]
        rank = (best[:, None] > middles).sum(dim=-1, keepdim=True)
        level = levels.gather(-1, rank)[:, 0]
        moved[k] = level - values[:, k]
        found.append(level)
        codes.append(order.gather(-1, rank)[:, 0])
    return torch.stack(found, dim=1), torch.stack(codes, dim=1), moved


round_columns = Replayed(_round_columns)
descend_columns = Replayed(_descend_columns)
