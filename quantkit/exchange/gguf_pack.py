"""Uniform grids as blocks of GGUF: the five types of 32 codes with an fp16 scale of their own.

    Q4_0, Q5_0, Q8_0: w = d * (q - 2**(bits - 1))       d fp16; q as below
    Q4_1, Q5_1:       w = d * q + m                     d, m fp16; q as below
    q of 4 bits: byte i holds code i below and code i + 16 above
    q of 5 bits: the fifth bits of all 32 codes, then nibbles as for 4 bits
    q of 8 bits: q - 128 as int8

A group of more than 32 columns becomes several blocks with the same scale. A grid of fewer bits fits a wider type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.exchange.exported import ExportLayer
from quantkit.exchange.gguf_blocks import BLOCK_TYPES
from quantkit.exchange.grid import Grid, rounding_of
from quantkit.formats.bcq import group_width
from quantkit.formats.planes import pack_bits

BLOCK = 32
_BY_SIZE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@dataclass(frozen=True)
class BlockFit:
    """A layer in one block type.

    scale, minimum: [N, G] fp16; minimum None for types without one. shift: [N, G] int32, what is added to a code of the
    grid. rounding: as of Target.check.
    """

    kind: str
    scale: Tensor
    minimum: Tensor | None
    shift: Tensor
    rounding: float


def block_fit(layer: ExportLayer) -> BlockFit:
    """The smallest type that holds a layer exactly, or else the smallest that holds it with its minima rounded to fp16.

    Raises CheckpointError for a layer that no type holds.
    """
    grid, columns = layer.uniform, layer.shape[1]
    if columns % BLOCK:
        raise CheckpointError(
            f"{layer.name}: its {columns} columns are no whole blocks of {BLOCK}, which GGUF stores; "
            "leave the layer in floating point (keep)"
        )
    width = group_width(grid.group_size, columns)
    if width % BLOCK:
        raise CheckpointError(
            f"{layer.name}: its groups of {width} columns are no whole blocks of {BLOCK}, which GGUF stores; "
            f"quantize with a group_size that is a multiple of {BLOCK}"
        )
    fits = [fit for kind in _BY_SIZE if (fit := _fit(kind, layer, grid)) is not None]
    if not fits:
        raise CheckpointError(
            f"{layer.name}: has {grid.bits} bits with an offset; GGUF's Q4_1 and Q5_1 hold offsets with up to 5 bits, "
            "and its Q8_0 up to 7 bits of zero: integer; quantize with one of these"
        )
    return min(fits, key=lambda fit: fit.rounding)  # the first, which is the smallest, of several


def _fit(kind: str, layer: ExportLayer, grid: Grid) -> BlockFit | None:
    block = BLOCK_TYPES[kind]
    if grid.bits > block.bits:
        return None
    if block.zero is None:
        minimum = grid.lowest.half()
        if not bool(minimum.isfinite().all()):
            return None
        shift = torch.zeros(minimum.shape, dtype=torch.int32)
        return BlockFit(kind, layer.step(), minimum, shift, rounding_of(grid, minimum.double()))
    if grid.zero is None:
        return None
    shift = torch.where(grid.step == 0, 0, block.zero - grid.zero)
    if bool(((shift < 0) | (shift + 2**grid.bits > 2**block.bits)).any()):
        return None
    return BlockFit(kind, layer.step(), None, shift.int(), 0.0)


def packed_blocks(codes: Tensor, fit: BlockFit, grid: Grid) -> Any:
    """The blocks [N, bytes] uint8 (numpy) of the grid's codes [N, K]."""
    rows, columns = codes.shape
    shifted = (codes.int() + grid.per_column(fit.shift, columns)).to(torch.uint8)
    quants = shifted.unflatten(1, (-1, BLOCK))  # [N, blocks, 32]
    parts = [_per_block(value, grid, columns) for value in (fit.scale, fit.minimum) if value is not None]
    bits = BLOCK_TYPES[fit.kind].bits
    if bits == 8:
        parts.append(quants ^ 0x80)
    else:
        if bits == 5:
            parts.append(pack_bits(quants >> 4))
        nibbles = quants & 0xF
        parts.append(nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4)
    return torch.cat(parts, dim=-1).reshape(rows, -1).numpy()


def _per_block(values: Tensor, grid: Grid, columns: int) -> Tensor:
    """[N, G] fp16 -> [N, blocks, 2] uint8: the bytes of each block's own."""
    own = grid.per_column(values, columns)[:, ::BLOCK].unsqueeze(-1)
    return own.clone(memory_format=torch.contiguous_format).view(torch.uint8)
