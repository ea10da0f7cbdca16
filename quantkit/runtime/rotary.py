"""Cosines and sines of single tokens from a table, where transformers makes them anew at every step.

Made anew they are nine kernels, each of which waits for the one before: 1 % of a step of an 8B model on an H200.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

Angles = tuple[Tensor, Tensor]
_BY_POSITION = ("default", "linear", "llama3", "yarn")
"""Kinds of transformers' embeddings whose angles depend on the position and on nothing else."""


class RotaryTable:
    """What stands in for the forward of a rotary embedding, ``original``.

    Tables stay: graphs that were captured read them. Each holds twice the positions of the one before, or more.
    """

    def __init__(self, original: Callable[..., Angles]) -> None:
        self._original = original
        self._tables: list[Tensor] = []

    def reserve(self, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        """Have the angles [positions, 2, D] of a type ready; what is behind the last is made anew."""
        table = self._tables[-1] if self._tables else None
        if table is not None and len(table) >= positions and (table.dtype, table.device) == (dtype, device):
            return
        count = 1 << (positions - 1).bit_length()
        x, places = torch.empty(1, 1, 1, dtype=dtype, device=device), torch.arange(count, device=device)
        self._tables.append(torch.stack(self._original(x, places[None]), 2)[0])

    def __call__(self, x: Tensor, position_ids: Tensor) -> Angles:
        """Cosine and sine [B, M, D] of positions [B, M], in the type of x."""
        table = self._tables[-1] if self._tables else None
        if table is None or position_ids.shape[1:] != (1,) or table.dtype != x.dtype or table.device != x.device:
            return self._original(x, position_ids)
        cosine, sine = table.index_select(0, position_ids[:, 0]).unbind(1)
        return cosine.unsqueeze(1), sine.unsqueeze(1)


def rotary_table(module: nn.Module) -> RotaryTable | None:
    """One for a module of transformers that makes angles of positions alone; None for any other."""
    if getattr(module, "rope_type", None) not in _BY_POSITION:
        return None
    takes = list(inspect.signature(module.forward).parameters)
    return RotaryTable(module.forward) if takes == ["x", "position_ids"] else None
