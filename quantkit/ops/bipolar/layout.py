"""The order in which the bipolar kernels read an operand: drawn in kernels/bipolar/planes.cuh, built with torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.planes import BITS_PER_BYTE, packed_width

BLOCK_ROWS = 64
"""Rows of an operand whose lines lie together."""

LINE_BYTES = 128
"""Bytes of a row in a k tile: 1024 codes of one plane, or 128 codes of a byte each."""

BITS_PER_LINE = BITS_PER_BYTE * LINE_BYTES
CHUNK_BYTES = 16
ORDER_ROWS = 32
"""Rows of a weight among which its features have an order of their own, see tile_weight."""

_CHUNKS = LINE_BYTES // CHUNK_BYTES
LINES = BITS_PER_LINE // LINE_BYTES
"""Lines of 128 columns in a k tile of planes."""

_PAIRED = (4, 2, 8)  # a tile's rows: 16 of a warp, the half of these, the row in it


def tile_lines(lines: Tensor) -> Tensor:
    """Rows of packed bytes to tiles.

    lines: [planes, M or N, bytes] uint8.
    Returns [blocks of 64 rows, k tiles of 128 bytes, planes, 64, 128], 16-byte chunks swizzled by row, zeros behind
    the last row and byte.
    """
    planes, count, width = lines.shape
    padded = pad(lines, (0, -width % LINE_BYTES, 0, -count % BLOCK_ROWS))
    split = padded.reshape(planes, -1, BLOCK_ROWS, padded.shape[2] // LINE_BYTES, _CHUNKS, CHUNK_BYTES)
    tiles = split.permute(1, 3, 0, 2, 4, 5)  # block, k tile, plane, row, chunk, byte
    return _swizzle(tiles).flatten(-2).contiguous()


def untile_lines(tiles: Tensor, count: int, width: int) -> Tensor:
    """Exact inverse of tile_lines: tiles -> [planes, count, width] uint8."""
    split = _swizzle(tiles.unflatten(-1, (_CHUNKS, CHUNK_BYTES)))
    lines = split.permute(2, 0, 3, 1, 4, 5).reshape(tiles.shape[2], tiles.shape[0] * BLOCK_ROWS, -1)
    return lines[:, :count, :width].contiguous()


def tile_weight(lines: Tensor) -> Tensor:
    """tile_lines of a weight, whose rows stand in another order among every 32 (featureOfRow in planes.cuh)."""
    return tile_lines(_reorder(pad(lines, (0, 0, 0, -lines.shape[1] % BLOCK_ROWS))))


def untile_weight(tiles: Tensor, count: int, width: int) -> Tensor:
    """Exact inverse of tile_weight: tiles -> [planes, count, width] uint8."""
    return _reorder(untile_lines(tiles, tiles.shape[0] * BLOCK_ROWS, width))[:, :count].contiguous()


def tile_scales(scales: Tensor, group_size: int, in_features: int) -> Tensor:
    """Scale codes by group, a multiple of 128 columns or the whole row, to one per line of a weight in tile order.

    scales: [N, G]. Returns [blocks of 64 rows, k tiles of 1024 columns, 8 lines, 64], zeros behind the last row.
    Of 16 rows of a tile, 8 and 8 take turns: a lane of the kernel reads those of its two rows at once.
    """
    lines = scales.repeat_interleave(_lines(group_size), dim=1)[:, : _lines(in_features)]
    padded = pad(lines, (0, -lines.shape[1] % LINES, 0, -len(lines) % BLOCK_ROWS))
    split = _reorder(padded[None])[0].unflatten(0, (-1, *_PAIRED)).unflatten(-1, (-1, LINES))
    return split.permute(0, 4, 5, 1, 3, 2).flatten(3).contiguous()  # block, k tile, line, 16 rows, of 8, half


def untile_scales(tiles: Tensor, count: int, group_size: int, in_features: int) -> Tensor:
    """Exact inverse of tile_scales: [blocks, k tiles, 8, 64] -> [count, G]."""
    blocks, k_tiles = tiles.shape[:2]
    sixteens, halves, eight = _PAIRED
    split = tiles.unflatten(3, (sixteens, eight, halves)).permute(0, 3, 5, 4, 1, 2)
    lines = _reorder(split.reshape(1, blocks * BLOCK_ROWS, k_tiles * LINES))[0]
    return lines[:count, : _lines(in_features) : _lines(group_size)].contiguous()


def plane_row_sums(bit_planes: Tensor, in_features: int) -> Tensor:
    """Sum of the codes of each row: [bits, N, ceil(K / 8)] uint8 -> [N] int32."""
    return plane_group_sums(bit_planes, in_features, bit_planes.shape[-1] * BITS_PER_BYTE)[:, 0]


def plane_group_sums(bit_planes: Tensor, in_features: int, width: int) -> Tensor:
    """Sum of the codes of each row and group of ``width`` columns, a multiple of 8: planes as above -> [N, G] int32."""
    assert bit_planes.shape[-1] == packed_width(in_features)
    counts = torch.tensor([bin(byte).count("1") for byte in range(1 << BITS_PER_BYTE)], dtype=torch.int32)
    groups = -(-bit_planes.shape[-1] * BITS_PER_BYTE // width)
    sums = torch.zeros(bit_planes.shape[1], groups, dtype=torch.int32, device=bit_planes.device)
    for i, plane in enumerate(bit_planes):
        ones = pad(counts.to(plane.device)[plane.int()], (0, -plane.shape[1] % (width // BITS_PER_BYTE)))
        sums += ones.unflatten(1, (groups, -1)).sum(dim=2, dtype=torch.int32) << i
    return sums


def _lines(columns: int) -> int:
    return -(-columns // LINE_BYTES)


def _reorder(lines: Tensor) -> Tensor:
    """Exchange bits 3-4 and 1-2 of the row number, its own inverse: [planes, a multiple of 32, bytes]."""
    return lines.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1, 4)


def _swizzle(chunks: Tensor) -> Tensor:
    """Exchange chunk c of row r with chunk c ^ (r % 8), its own inverse: [..., 64, 8, 16]."""
    row = torch.arange(BLOCK_ROWS, device=chunks.device)[:, None]
    chunk = torch.arange(_CHUNKS, device=chunks.device)[None, :]
    index = (chunk ^ (row % _CHUNKS))[..., None].expand(chunks.shape)
    return chunks.gather(-2, index)
