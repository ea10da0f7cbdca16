"""The prepared order of a bcq weight: what prepare() builds at load and the CUDA kernels read.

``tiles`` [row tiles, k tiles, bits, 128] int32 and ``scale_tiles`` [row tiles, groups, 8, entries, 2], entries being
the planes' scales and then the offset where there is one: fp16, or bytes holding the 8-bit codes (an offset's in two's
complement) with ``factor_tiles`` [row tiles, 8, 2] fp16, what the codes of each row count in; kernels/bcq/tiles.cuh
draws them. Rows are padded to 16 and columns to 256 with zeros, and groups to whole k tiles where the kernels can then
read straight on. Both directions are permutations, so preparing and restoring change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.bcq import BcqTensors, group_count
from quantkit.formats.planes import BITS_PER_BYTE, packed_width
from quantkit.ops.bcq.instances import SEGMENTS, TILE_COLUMNS, TILE_ROWS

_ROW_HALVES, _ROWS_PER_HALF = 2, 8
_COLUMN_HALVES, _QUADS = 2, 4  # a tile row is 2 x 4 words of 32 columns
_WORDS = _COLUMN_HALVES * _QUADS


@dataclass(frozen=True)
class BcqTiles:
    """A prepared weight [rows, columns]; factor_tiles is None with fp16 scales. See above for the tensors."""

    tiles: Tensor
    scale_tiles: Tensor
    factor_tiles: Tensor | None
    rows: int
    columns: int
    group_size: int

    @property
    def weight_bits(self) -> int:
        """q, planes."""
        return self.tiles.shape[2]

    @property
    def groups(self) -> int:
        """Groups per row, padding included."""
        return self.scale_tiles.shape[1]

    @property
    def entries(self) -> int:
        """Numbers per group and row: q scales, and one more with an offset."""
        return self.scale_tiles.shape[3]

    @property
    def scale_bits(self) -> int:
        """16 or 8, of every entry."""
        return BITS_PER_BYTE * self.scale_tiles.element_size()


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
    return words.permute(1, 4, 0, 3, 6, 5, 2).reshape(row_tiles, k_tiles, bits, -1)


def untile_signs(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of tile_signs for a weight of ``rows`` x ``columns``."""
    row_tiles, k_tiles, bits, _ = tiles.shape
    split = tiles.view(row_tiles, k_tiles, bits, _ROWS_PER_HALF, _QUADS, _COLUMN_HALVES, _ROW_HALVES)
    words = split.permute(2, 0, 6, 3, 1, 5, 4).reshape(bits, row_tiles * TILE_ROWS, k_tiles * _WORDS)
    return words.view(torch.uint8)[:, :rows, : packed_width(columns)].contiguous()


def padded_groups(group_size: int, columns: int) -> int:
    """Groups per row in scale tiles: every k tile whole where a group is one activation segment of the kernels."""
    groups = group_count(group_size, columns)
    whole = TILE_COLUMNS // group_size if group_size in SEGMENTS else 0
    return max(groups, tile_counts(1, columns)[1] * whole) if groups > 1 else groups


def tile_scales(scales: Tensor, offset: Tensor | None, group_size: int, columns: int) -> Tensor:
    """scales [bits, N, G] and offset [N, G] or None -> [row tiles, padded groups, 8, entries, 2] of scales' dtype."""
    entries = scales if offset is None else torch.cat([scales, offset.view(scales.dtype).unsqueeze(0)])
    count, rows, stored = entries.shape
    row_tiles, _ = tile_counts(rows, columns)
    groups = padded_groups(group_size, columns)
    padded = pad(entries, (0, groups - stored, 0, row_tiles * TILE_ROWS - rows))
    split = padded.view(count, row_tiles, _ROW_HALVES, _ROWS_PER_HALF, groups)
    return split.permute(1, 4, 3, 0, 2).contiguous()


def tile_factors(scale_factors: Tensor) -> Tensor:
    """[N, 1] fp16 -> [row tiles, 8, 2] fp16."""
    rows = scale_factors.shape[0]
    row_tiles, _ = tile_counts(rows, 1)
    padded = pad(scale_factors, (0, 0, 0, row_tiles * TILE_ROWS - rows))
    return padded.view(row_tiles, _ROW_HALVES, _ROWS_PER_HALF).transpose(1, 2).contiguous()


def tile(stored: BcqTensors, columns: int, group_size: int) -> BcqTiles:
    """The prepared weight of canonical tensors."""
    return BcqTiles(
        tiles=tile_signs(stored.signs),
        scale_tiles=tile_scales(stored.scales, stored.offset, group_size, columns),
        factor_tiles=None if stored.scale_factors is None else tile_factors(stored.scale_factors),
        rows=stored.signs.shape[1],
        columns=columns,
        group_size=group_size,
    )


def untile(weight: BcqTiles) -> BcqTensors:
    """The canonical tensors that a prepared weight was made from, bit for bit."""
    row_tiles, groups, _, count, _ = weight.scale_tiles.shape
    entries = weight.scale_tiles.permute(3, 0, 4, 2, 1).reshape(count, row_tiles * TILE_ROWS, groups)
    entries = entries[:, : weight.rows, : group_count(weight.group_size, weight.columns)]
    scales = entries[: weight.weight_bits].contiguous()
    offset = entries[weight.weight_bits].contiguous() if count > weight.weight_bits else None
    signs = untile_signs(weight.tiles, weight.rows, weight.columns)
    if weight.factor_tiles is None:
        return BcqTensors(signs, scales, offset)
    factors = weight.factor_tiles.transpose(1, 2).reshape(-1, 1)[: weight.rows].contiguous()
    return BcqTensors(signs, scales, None if offset is None else offset.view(torch.int8), factors)
