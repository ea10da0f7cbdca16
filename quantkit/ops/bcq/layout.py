"""The prepared order of a bcq weight: what prepare() builds at load and the CUDA kernels read.

``tiles`` [n tiles, k tiles, bits, 128] int32 and ``scale_tiles`` [n tiles, groups, 8, entries, 2], entries being
the planes' scales and then the offset where there is one: fp16, or bytes holding the 8-bit codes (an offset's in two's
complement) with ``factor_tiles`` [n tiles, 8, 2] fp16, what the codes of each row count in; kernels/bcq/tiles.cuh
draws them. N is padded to 16 and K to 256 with zeros, and groups to whole k tiles where the kernels can then
read straight on. Preparing and restoring change no bit that is stored.

There are three orders. That for latency holds sign planes, which the GEMVs read as they are; it is made for up to four
tokens. Those for batches hold the same bits so that the fused product of many tokens gets floats with half the
instructions, at columns that let it read x as it is (codes.py): as codes of levels, or, where the scales of two planes,
or of four and more, double from plane to plane, as the numbers of a grid, of whose scales the first stands for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.bcq import BcqTensors, group_count
from quantkit.formats.planes import BITS_PER_BYTE, packed_width
from quantkit.ops.bcq.codes import grid_to_planes, to_codes, to_grid, to_planes
from quantkit.ops.bcq.instances import SEGMENTS, TILE_K, TILE_N
from quantkit.ops.bcq.order import GRID_PLANES, Order

_ROW_HALVES, _ROWS_PER_HALF = 2, 8
_COLUMN_HALVES, _QUADS = 2, 4  # a tile row is 2 x 4 words of 32 elements
_WORDS = _COLUMN_HALVES * _QUADS
_FROM_SIGNS: dict[Order, Callable[[Tensor], Tensor]] = {Order.CODES: to_codes, Order.GRID: to_grid}
_TO_SIGNS: dict[Order, Callable[[Tensor], Tensor]] = {Order.CODES: to_planes, Order.GRID: grid_to_planes}


class BcqSizes(NamedTuple):
    """Of a prepared weight, see BcqTiles."""

    weight_bits: int
    entries: int
    scale_bits: int
    out_features: int
    in_features: int
    group_size: int
    order: Order


@dataclass(frozen=True)
class BcqTiles:
    """A prepared weight [out_features, in_features], see above.

    factor_tiles: None with fp16 scales.
    """

    tiles: Tensor
    scale_tiles: Tensor
    factor_tiles: Tensor | None
    out_features: int
    in_features: int
    group_size: int
    order: Order = Order.PLANES

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
        """Numbers per group and row: q scales, or one of a grid, and one more with an offset."""
        return self.scale_tiles.shape[3]

    @property
    def scale_bits(self) -> int:
        """16 or 8, of every entry."""
        return BITS_PER_BYTE * self.scale_tiles.element_size()

    @property
    def sizes(self) -> BcqSizes:
        """All that plans depend on."""
        stored = self.weight_bits, self.entries, self.scale_bits
        return BcqSizes(*stored, self.out_features, self.in_features, self.group_size, self.order)


def tile_counts(out_features: int, in_features: int) -> tuple[int, int]:
    """(n tiles, k tiles) of an [N, K] weight."""
    return -(-out_features // TILE_N), -(-in_features // TILE_K)


def tile_signs(signs: Tensor) -> Tensor:
    """[bits, N, ceil(K/8)] uint8 -> [n tiles, k tiles, bits, 128] int32."""
    bits, n, width = signs.shape
    n_tiles, k_tiles = tile_counts(n, width * BITS_PER_BYTE)
    tile_bytes = TILE_K // BITS_PER_BYTE
    padded = pad(signs, (0, k_tiles * tile_bytes - width, 0, n_tiles * TILE_N - n))
    words = padded.view(torch.int32).view(bits, n_tiles, _ROW_HALVES, _ROWS_PER_HALF, k_tiles, _COLUMN_HALVES, _QUADS)
    return words.permute(1, 4, 0, 3, 6, 5, 2).reshape(n_tiles, k_tiles, bits, -1)


def untile_signs(tiles: Tensor, out_features: int, in_features: int) -> Tensor:
    """Inverse of tile_signs for a weight [N, K]."""
    n_tiles, k_tiles, bits, _ = tiles.shape
    split = tiles.view(n_tiles, k_tiles, bits, _ROWS_PER_HALF, _QUADS, _COLUMN_HALVES, _ROW_HALVES)
    words = split.permute(2, 0, 6, 3, 1, 5, 4).reshape(bits, n_tiles * TILE_N, k_tiles * _WORDS)
    return words.view(torch.uint8)[:, :out_features, : packed_width(in_features)].contiguous()


def padded_groups(group_size: int, in_features: int) -> int:
    """Groups per row in scale tiles: every k tile whole where a group is one activation segment of the kernels."""
    groups = group_count(group_size, in_features)
    whole = TILE_K // group_size if group_size in SEGMENTS else 0
    return max(groups, tile_counts(1, in_features)[1] * whole) if groups > 1 else groups


def tile_scales(scales: Tensor, offset: Tensor | None, group_size: int, in_features: int) -> Tensor:
    """scales [bits, N, G] and offset [N, G] or None -> [n tiles, padded groups, 8, entries, 2] of scales' dtype."""
    entries = scales if offset is None else torch.cat([scales, offset.view(scales.dtype).unsqueeze(0)])
    count, n, stored = entries.shape
    n_tiles, _ = tile_counts(n, in_features)
    groups = padded_groups(group_size, in_features)
    padded = pad(entries, (0, groups - stored, 0, n_tiles * TILE_N - n))
    split = padded.view(count, n_tiles, _ROW_HALVES, _ROWS_PER_HALF, groups)
    return split.permute(1, 4, 3, 0, 2).contiguous()


def tile_factors(scale_factors: Tensor) -> Tensor:
    """[N, 1] fp16 -> [n tiles, 8, 2] fp16."""
    n = scale_factors.shape[0]
    n_tiles, _ = tile_counts(n, 1)
    padded = pad(scale_factors, (0, 0, 0, n_tiles * TILE_N - n))
    return padded.view(n_tiles, _ROW_HALVES, _ROWS_PER_HALF).transpose(1, 2).contiguous()


def _doubled(steps: Tensor, planes: int) -> Tensor:
    """Scales [1, ..] of plane 0 -> those of so many planes of a grid."""
    powers = 2.0 ** torch.arange(planes, dtype=steps.dtype, device=steps.device)
    return steps * powers.view(-1, *[1] * (steps.dim() - 1))


def is_grid(stored: BcqTensors) -> bool:
    """Whether a weight can be in the order of a grid: two planes, or four and more, each with twice the fp16 scales of
    the one before, bit for bit."""
    scales = stored.scales
    if len(scales) not in GRID_PLANES or stored.scale_factors is not None:
        return False
    return torch.equal(_doubled(scales[:1], len(scales)).view(torch.int16), scales.contiguous().view(torch.int16))


def tile(stored: BcqTensors, in_features: int, group_size: int, *, order: Order = Order.PLANES) -> BcqTiles:
    """The prepared weight of canonical tensors; Order.GRID of such that ``is_grid`` allows."""
    signs, scales = tile_signs(stored.signs), stored.scales[: order.scales(len(stored.scales))]
    return BcqTiles(
        tiles=_FROM_SIGNS[order](signs) if order in _FROM_SIGNS else signs,
        scale_tiles=tile_scales(scales, stored.offset, group_size, in_features),
        factor_tiles=None if stored.scale_factors is None else tile_factors(stored.scale_factors),
        out_features=stored.signs.shape[1],
        in_features=in_features,
        group_size=group_size,
        order=order,
    )


def untile(weight: BcqTiles) -> BcqTensors:
    """The canonical tensors that a prepared weight was made from, bit for bit."""
    n_tiles, groups, _, count, _ = weight.scale_tiles.shape
    entries = weight.scale_tiles.permute(3, 0, 4, 2, 1).reshape(count, n_tiles * TILE_N, groups)
    entries = entries[:, : weight.out_features, : group_count(weight.group_size, weight.in_features)]
    stored = weight.order.scales(weight.weight_bits)
    whole = weight.order != Order.GRID
    scales = entries[:stored].contiguous() if whole else _doubled(entries[:1], weight.weight_bits)
    offset = entries[stored].contiguous() if count > stored else None
    tiles = _TO_SIGNS[weight.order](weight.tiles) if weight.order in _TO_SIGNS else weight.tiles
    signs = untile_signs(tiles, weight.out_features, weight.in_features)
    if weight.factor_tiles is None:
        return BcqTensors(signs, scales, offset)
    factors = weight.factor_tiles.transpose(1, 2).reshape(-1, 1)[: weight.out_features].contiguous()
    return BcqTensors(signs, scales, None if offset is None else offset.view(torch.int8), factors)


def join_experts(weights: Sequence[BcqTiles]) -> BcqTiles:
    """Prepared weights of one shape in one, one after the other; its out_features stay those of one."""
    first = weights[0]
    return replace(
        first,
        tiles=torch.cat([weight.tiles for weight in weights]),
        scale_tiles=torch.cat([weight.scale_tiles for weight in weights]),
        factor_tiles=None
        if first.factor_tiles is None
        else torch.cat([weight.factor_tiles for weight in weights if weight.factor_tiles is not None]),
    )


def split_experts(weights: BcqTiles) -> list[BcqTiles]:
    """Views of the single weights of what join_experts gives."""
    n_tiles, _ = tile_counts(weights.out_features, 1)
    parts = weights.tiles.split(n_tiles), weights.scale_tiles.split(n_tiles)
    factors = itertools.repeat(None) if weights.factor_tiles is None else weights.factor_tiles.split(n_tiles)
    return [
        replace(weights, tiles=tiles, scale_tiles=scales, factor_tiles=own)
        for tiles, scales, own in zip(*parts, factors, strict=False)  # as many factors as are asked for
    ]
