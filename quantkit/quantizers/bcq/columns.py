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
    rows, errors, ranks, stored = rows.clone(), [], [], []
    for i in range(len(rows)):
        rank = torch.searchsorted(middles, rows[i, :, None])  # how many middles are smaller
        level = levels.gather(-1, rank)[:, 0]
        error = (rows[i] - level) / factor[i, i]
        rows[i + 1 :].addr_(factor[i, i + 1 :], error, alpha=-1)
        stored.append(level)
        errors.append(error)
        ranks.append(rank)
    codes = order.gather(-1, torch.cat(ranks, dim=1))
    return torch.stack(stored), torch.stack(errors), codes.t()


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
    found, ranks = [], []
    for k in range(values.shape[1]):
        residual = pressure[:, k] - hessian[:k, k] @ moved[:k]
        best = torch.addcdiv(values[:, k], residual, hessian[k, k])
        rank = torch.searchsorted(middles, best[:, None])
        level = levels.gather(-1, rank)
        torch.sub(level[:, 0], values[:, k], out=moved[k])
        found.append(level)
        ranks.append(rank)
    return torch.cat(found, dim=1), order.gather(-1, torch.cat(ranks, dim=1)), moved


round_columns = Replayed(_round_columns)
descend_columns = Replayed(_descend_columns)
