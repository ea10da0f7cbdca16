"""Weights in the order in which the kernels of integers read them, and which weights those take."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.bcq import group_width
from quantkit.formats.bipolar import FLOAT_ACT_BITS, LARGEST_BYTE, largest_value
from quantkit.formats.planes import BITS_PER_BYTE, packed_width
from quantkit.ops.bipolar.layout import LINE_BYTES, plane_group_sums, plane_row_sums, tile_scales, tile_weight
from quantkit.ops.bipolar.product import Weight


def takes_tiles(act_bits: int, group_size: int, in_features: int, *, coded: bool) -> bool:
    """Whether the products of integers take a weight: quantized activations, and either one scale per row, or scale
    codes (coded) of whole lines of columns."""
    width = group_width(group_size, in_features)
    return act_bits != FLOAT_ACT_BITS and (width == in_features or (coded and width % LINE_BYTES == 0))


def tiled_weight(
    bit_planes: Tensor, scales: Tensor, scale_factors: Tensor | None, group_size: int, in_features: int
) -> Weight:
    """Canonical tensors [bits, N, ceil(K / 8)], [N, G] and [N, 1] of a weight that takes_tiles."""
    tiles = tile_weight(bit_planes)
    if scale_factors is None:
        return Weight(tiles, plane_row_sums(bit_planes, in_features), scales)
    width = group_width(group_size, in_features)
    starts = torch.arange(0, in_features, width, device=scales.device)
    columns = (in_features - starts).clamp(max=width)
    sums_of_codes = plane_group_sums(bit_planes, in_features, packed_width(width) * BITS_PER_BYTE)
    values = 2 * sums_of_codes - largest_value(len(bit_planes)) * columns
    sums = (values * scales.int()).sum(dim=1) + (LARGEST_BYTE + 1) * in_features
    return Weight(tiles, sums.int(), scale_factors, tile_scales(scales, width, in_features))
