"""How the INT8 attention kernels read Q, K and V, and the tiles that hold the codes of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (64, 96, 128, 256)
"""Widths of a head that kernels are made for; others are filled up with zeros to the next of them."""

TILE_KEYS, STAGE_KEYS = 64, 128
"""Keys whose codes of K and V lie together, for products of warps and of warpgroups."""

RUN = 8
"""Elements that the kernels read at a time."""

_RUN_ALIGNMENT = 16  # bytes
_MOST_STRIDE = 2**31 - 1


def whole_runs(width: int) -> int:
    """The width of a head in whole runs."""
    return -(-width // RUN) * RUN


def aligned(x: Tensor) -> Tensor:
    """x [B, H, M, D] as the kernels read it: a copy with D filled up where it lies otherwise."""
    *outer, inner = x.stride()
    whole = x.shape[-1] % RUN == 0 and x.data_ptr() % _RUN_ALIGNMENT == 0 and inner == 1
    if whole and all(s * x.itemsize % _RUN_ALIGNMENT == 0 and s <= _MOST_STRIDE for s in outer):
        return x
    filled = x.new_zeros(*x.shape[:-1], whole_runs(x.shape[-1]))
    filled[..., : x.shape[-1]] = x
    return filled


def code_tiles(key: Tensor, head_dim: int, tile_keys: int) -> Tensor:
    """Room for the codes of K and V beside key [B, Hkv, T, D]: [B, Hkv, tiles, 2 * tile_keys * head_dim] int8."""
    batch, kv_heads, keys, _ = key.shape
    shape = (batch, kv_heads, -(-keys // tile_keys), 2 * tile_keys * head_dim)
    return torch.empty(shape, dtype=torch.int8, device=key.device)
