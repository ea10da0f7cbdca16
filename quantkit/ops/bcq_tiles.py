"""The prepared order of a bcq weight: what prepare() builds at load and the CUDA kernels read.

``tiles`` [row tiles, k tiles, bits, 128] int32 and ``scale_tiles`` [row tiles, G, 4, entries, 4] fp16, entries being
the planes' scales and then the offset where there is one; kernels/bcq_tiles.cuh draws both. Rows are padded to 16 and
columns to 256 with zeros. Both directions are permutations, so preparing and restoring change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.planes import BITS_PER_BYTE, packed_width

TILE_ROWS = 16
TILE_COLUMNS = 256
_ROW_HALVES, _ROWS_PER_HALF = 2, 8
_COLUMN_HALVES, _QUADS = 2, 4  # a tile row is 2 x 4 words of 32 columns
_WORDS = _COLUMN_HALVES * _QUADS
_ROW_PAIR = 2


@dataclass(frozen=True)
class BcqTensors:
    """Canonical tensors: signs [bits, N, ceil(K/8)] uint8, scales [bits, N, G] fp16, offset [N, G] fp16 or None."""

    signs: Tensor
    scales: Tensor
    offset: Tensor | None


def tile_counts(rows: int, columns: int) -> tuple[int, int]:
    """(row tiles, k tiles) of an [N, K] weight."""
    return -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)


def tile_signs(signs: Tensor) -> Tensor:
    """[bits, N, ceil(K/8)] uint8 -> [row tiles, k tiles, bits, 128] int32."""
    bits, rows, width = signs.shape
    row_tiles, k_tiles = tile_counts(rows, width * BITS_PER_BYTE)
    tile_bytes = TILE_COLUMNS // BITS_PER_BYTE
    padded = pad(signs, (0, k_tiles * tile_bytes - width, 0, row_tiles * TILE_ROWS - rows))
    words = padded.view(torch.int32).view(bits, row_tiles, _ROW_HALVES, _ROWS_PER_HALF, k_tiles, _COLUMN_HALVES, _QUADS)
    return words.permute(1, 4, 0, 3, 6, 2, 5).reshape(row_tiles, k_tiles, bits, -1)


def untile_signs(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of tile_signs for a weight of ``rows`` x ``columns``."""
    row_tiles, k_tiles, bits, _ = tiles.shape
    split = tiles.view(row_tiles, k_tiles, bits, _ROWS_PER_HALF, _QUADS, _ROW_HALVES, _COLUMN_HALVES)
    words = split.permute(2, 0, 5, 3, 1, 6, 4).reshape(bits, row_tiles * TILE_ROWS, k_tiles * _WORDS)
    return words.view(torch.uint8)[:, :rows, : packed_width(columns)].contiguous()


def tile_scales(scales: Tensor, offset: Tensor | None) -> Tensor:
    """scales [bits, N, G] and offset [N, G] or None -> [row tiles, G, 4, entries, 4] fp16."""
    entries = scales if offset is None else torch.cat([scales, offset.unsqueeze(0)])
    count, rows, groups = entries.shape
    row_tiles, _ = tile_counts(rows, TILE_COLUMNS)
    padded = pad(entries, (0, 0, 0, row_tiles * TILE_ROWS - rows))
    split = padded.view(count, row_tiles, _ROW_HALVES, _QUADS, _ROW_PAIR, groups)
    return split.permute(1, 5, 3, 0, 2, 4).reshape(row_tiles, groups, _QUADS, count, _ROW_HALVES * _ROW_PAIR)


def untile_scales(scale_tiles: Tensor, rows: int, weight_bits: int) -> tuple[Tensor, Tensor | None]:
    """Inverse of tile_scales: (scales [bits, N, G], offset [N, G] or None)."""
    row_tiles, groups, _, count, _ = scale_tiles.shape
    split = scale_tiles.view(row_tiles, groups, _QUADS, count, _ROW_HALVES, _ROW_PAIR)
    entries = split.permute(3, 0, 4, 2, 5, 1).reshape(count, row_tiles * TILE_ROWS, groups)[:, :rows]
    offset = entries[weight_bits].contiguous() if count > weight_bits else None
    return entries[:weight_bits].contiguous(), offset


def untile(tiles: Tensor, scale_tiles: Tensor, rows: int, columns: int) -> BcqTensors:
    """The canonical tensors that prepared ones were made from, bit for bit."""
    scales, offset = untile_scales(scale_tiles, rows, tiles.shape[2])
    return BcqTensors(untile_signs(tiles, rows, columns), scales, offset)
