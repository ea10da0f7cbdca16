"""Seeded operands of one decoding step, for the tests of its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.ops.decode.launch import Token


def token_behind_others(
    head_dim: int, dtype: torch.dtype, device: torch.device, sequences: int = 1
) -> tuple[Tensor, Token, tuple[Tensor, Tensor], Tensor]:
    """Query, token, cache and mask of a token of each sequence behind 280 others, six heads on two caches."""
    q = torch.randn(sequences, 6, 1, head_dim, device=device).to(dtype)
    own = torch.randn(2, sequences, 2, 1, head_dim, device=device).to(dtype)
    keys, values = torch.randn(2, sequences, 2, 300, head_dim, device=device).to(dtype).unbind()
    mask, position = torch.ones(1, 1, 1, 300, device=device).bool(), torch.tensor([280], device=device)
    mask[..., 281:] = False
    return q, Token(own[0], own[1], position), (keys, values), mask
