"""How the INT8 and INT4 kernels read codes: in the tiles of the bipolar kernels, and columns by channel.

A line of 128 bytes holds 128 INT8 codes (int8 tensors) or 256 INT4 codes (uint8). K_ext columns of codes come from K
channels of x: the first K are the channels themselves, those behind are further slices of some (formats/flatten.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.ops.bipolar.layout import (
    BLOCK_ROWS,
    LINE_BYTES,
    ORDER_ROWS,
    tile_lines,
    tile_weight,
    untile_lines,
    untile_weight,
)


def codes_per_line(dtype: torch.dtype) -> int:
    """Columns of a k tile: of nibbles in uint8, or of bytes in int8."""
    return LINE_BYTES * (2 if dtype == torch.uint8 else 1)


def code_tiles(tokens: int, extended: int, packed: bool, device: torch.device) -> Tensor:
    """Room for codes [tokens, K_ext] in tile order: uint8 of nibbles if packed, else int8."""
    dtype = torch.uint8 if packed else torch.int8
    shape = (-(-tokens // BLOCK_ROWS), -(-extended // codes_per_line(dtype)), 1, BLOCK_ROWS, LINE_BYTES)
    return torch.empty(shape, dtype=dtype, device=device)


def tile_codes(codes: Tensor, *, weight: bool = False) -> Tensor:
    """Codes [M or N, K_ext] int8 or [M or N, K_ext / 2] uint8 nibbles in tile order.

    weight: in the order that features have in the tiles of a weight.
    """
    return (tile_weight if weight else tile_lines)(codes.view(torch.uint8)[None]).view(codes.dtype)


def untile_codes(tiles: Tensor, count: int, extended: int, *, weight: bool = False) -> Tensor:
    """Exact inverse of tile_codes; count: M or N. extended: K_ext."""
    width = extended // 2 if tiles.dtype == torch.uint8 else extended
    return (untile_weight if weight else untile_lines)(tiles.view(torch.uint8), count, width)[0].view(tiles.dtype)


def column_slots(source_channel: Tensor, source_segment: Tensor, in_features: int) -> tuple[Tensor, Tensor]:
    """The columns behind the first K, by channel: slots [3, K_ext - K] and slot_starts [ceil(K / 32) + 1], int32.

    source_channel, source_segment: [K_ext] int32 (quantkit.formats.flatten). in_features: K.
    Rows of slots: column, channel (rising), segment. slot_starts[i]: the first slot of channels from 32 i on.
    """
    channel, order = source_channel[in_features:].sort(stable=True)
    slots = torch.stack((order.int() + in_features, channel, source_segment[in_features:][order]))
    runs = torch.arange(-(-in_features // ORDER_ROWS) + 1, dtype=torch.int32, device=channel.device)
    return slots, torch.searchsorted(channel, runs * ORDER_ROWS, out_int32=True)


def column_map(slots: Tensor, in_features: int) -> tuple[Tensor, Tensor]:
    """Inverse of column_slots: source_channel, source_segment [K_ext] int32."""
    channel = torch.arange(in_features + slots.shape[1], dtype=torch.int32, device=slots.device)
    segment, (column, *rest) = torch.zeros_like(channel), slots
    channel[column.long()], segment[column.long()] = rest
    return channel, segment
