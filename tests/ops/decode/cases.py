"""Seeded operands of one decoding step, and of a prompt, for the tests of their kernels."""

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


def prompt_heads(
    sequences: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int = 64,
    *,
    own_angles: bool = False,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Heads of one product for q, k and v, six of queries and two of keys; angles; and a cache of NaN behind them.

    own_angles: of every sequence.
    """
    product = torch.randn(sequences, tokens, 10 * head_dim, device=device).to(dtype)
    parts = product.split((6 * head_dim, 2 * head_dim, 2 * head_dim), -1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in parts)
    angles = torch.rand(sequences if own_angles else 1, tokens, head_dim, device=device) * 6
    keys, values = torch.full((2, sequences, 2, tokens + 3, head_dim), torch.nan, dtype=dtype, device=device).unbind()
    return (q, k, v), (angles.cos().to(dtype), angles.sin().to(dtype)), (keys, values)
