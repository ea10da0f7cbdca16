"""Sign words as codes of a weight's levels, from which the fused product makes selectors with few instructions.

``words`` [..., bits, 128] int32 hold 32 columns of a row each, a word per plane (layout.py). In the order of codes the
same bits stand where kernels/bcq/level_codes.cuh draws them, planes 1 to 3 of the first four as whether they agree with
plane 0. Both directions are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]
_BLOCK_PLANES = 4
_EVEN_BITS, _NIBBLE_ONES = 0x55555555, 0x11111111
_BYTE_ONES, _LOW_ONES = 0x01010101, 0x1111
_ODD_BITS = -0x55555556  # 0xAAAAAAAA as int32


def to_codes(words: Tensor) -> Tensor:
    """Planes -> codes."""
    return _by_block(words, _CODES)


def to_planes(words: Tensor) -> Tensor:
    """Codes -> planes."""
    return _by_block(words, _PLANES)


def _by_block(words: Tensor, changes: dict[int, _Change]) -> Tensor:
    planes = words.unbind(-2)
    blocks = [block for block in (planes[:_BLOCK_PLANES], planes[_BLOCK_PLANES:]) if block]
    return torch.stack([word for block in blocks for word in changes[len(block)](block)], -2)


def _same(words: Sequence[Tensor]) -> Sequence[Tensor]:
    return words


def _two_codes(planes: Sequence[Tensor]) -> list[Tensor]:
    low, high = planes
    return [(low & _EVEN_BITS) | (high & _EVEN_BITS) << 1, (low >> 1 & _EVEN_BITS) | (high & _ODD_BITS)]


def _two_planes(codes: Sequence[Tensor]) -> list[Tensor]:
    even, odd = codes
    return [(even & _EVEN_BITS) | (odd & _EVEN_BITS) << 1, (even >> 1 & _EVEN_BITS) | (odd & _ODD_BITS)]


def _nibbles(planes: Sequence[Tensor], s: int) -> Tensor:
    """Bit i of nibble m: plane i at column 4 m + s."""
    bits = [(plane >> s & _NIBBLE_ONES) << i for i, plane in enumerate(planes)]
    return bits[0] | bits[1] | bits[2]


def _plane(codes: Sequence[Tensor], i: int) -> Tensor:
    """Inverse of _nibbles for plane i, of as many words as there are."""
    bits = [(code >> i & _NIBBLE_ONES) << s for s, code in enumerate(codes)]
    return bits[0] | bits[1] | bits[2] | (bits[3] if len(bits) > 3 else 0)


def _three_codes(planes: Sequence[Tensor]) -> list[Tensor]:
    return [_nibbles(planes, s) | (planes[s] >> 3 & _NIBBLE_ONES) << 3 for s in range(3)]


def _three_planes(codes: Sequence[Tensor]) -> list[Tensor]:
    return [_plane(codes, i) | (codes[i] >> 3 & _NIBBLE_ONES) << 3 for i in range(3)]


def _spread(bits: Tensor) -> Tensor:
    """Bits 0, 4, 8 and 12 to bits 0, 8, 16 and 24."""
    pairs = (bits | bits << 8) & 0x00110011
    return (pairs | pairs << 4) & _BYTE_ONES


def _gather(bits: Tensor) -> Tensor:
    """Inverse of _spread."""
    pairs = (bits | bits >> 4) & 0x00110011
    return (pairs | pairs >> 8) & _LOW_ONES


def _four_codes(planes: Sequence[Tensor]) -> list[Tensor]:
    agree = [~(plane ^ planes[0]) for plane in planes[1:]]
    codes = []
    for s in range(_BLOCK_PLANES):
        negative = ~planes[0] >> s & _NIBBLE_ONES
        lower, upper = _spread(negative & _LOW_ONES), _spread(negative >> 16 & _LOW_ONES)
        codes.append(_nibbles(agree, s) | lower << 7 | upper << 3)
    return codes


def _four_planes(codes: Sequence[Tensor]) -> list[Tensor]:
    first = torch.zeros_like(codes[0])
    for s, code in enumerate(codes):
        negative = _gather(code >> 7 & _BYTE_ONES) | _gather(code >> 3 & _BYTE_ONES) << 16
        first |= (~negative & _NIBBLE_ONES) << s
    return [first, *(~(_plane(codes, i) ^ first) for i in range(3))]


_CODES: dict[int, _Change] = {1: _same, 2: _two_codes, 3: _three_codes, 4: _four_codes}
_PLANES: dict[int, _Change] = {1: _same, 2: _two_planes, 3: _three_planes, 4: _four_planes}
