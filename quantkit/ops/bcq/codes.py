"""Sign words as codes of a weight's levels, from which the fused product makes selectors with few instructions.

``words`` [n tiles, k tiles, bits, 128] int32 hold 32 columns of a row each, a word per plane (layout.py). In the order
of codes the same bits stand where kernels/bcq/level_codes.cuh draws them: columns change places among the four words of
half a tile row, so that products meet x as it is, and planes 1 to 3 of the first four become whether they agree with
plane 0. A weight of two planes, or of four and more, in equal steps takes the order of a grid instead, where the planes
of a column are a number of as many bits. Both directions are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from quantkit.formats.planes import BITS_PER_BYTE

_Change = Callable[[Sequence[Tensor]], Sequence[Tensor]]
_BLOCK_PLANES = 4
_QUADS, _WORD_BITS, _PLACE_BITS = 4, 32, 5
_CHUNK_WORDS = 1 << 22  # that are converted at once: what conversions need of memory is some times as much
_EVEN_BITS, _NIBBLE_ONES = 0x55555555, 0x11111111
_BYTE_ONES, _LOW_ONES = 0x01010101, 0x1111
_ODD_BITS = -0x55555556  # 0xAAAAAAAA as int32
_LOWEST, _HIGHEST_15 = 0x00010001, 0x7FFF7FFF  # of both halves of a word

# A column of half a tile row is seven bits: the number of its word (6, 5) and its place in the word (4 .. 0). The order
# of codes exchanges one pair of these bits after the other, which pairs by the weight's planes; the first two decide
# which of the four lanes of a row gets a column.
_TO_LANES = ((6, 2), (5, 1))
_EXCHANGES = {
    1: (*_TO_LANES, (4, 0), (3, 2), (2, 1), (1, 0)),
    2: (*_TO_LANES, (4, 3), (3, 0), (2, 1), (1, 0)),
    3: (*_TO_LANES, (2, 0), (1, 0)),  # and more
}
_HALVES_TURNED = {  # numbers of so many bits stand one bit higher in either half of a word
    2: (*_TO_LANES, (4, 0), (3, 0), (2, 1), (1, 0)),
    4: (*_TO_LANES, (4, 0), (3, 0), (2, 0), (1, 0)),
}
_IN_BYTES = (*_TO_LANES, (4, 0), (2, 0), (1, 0))  # numbers of more bits


def to_codes(words: Tensor) -> Tensor:
    """Planes -> codes."""
    exchanges = _exchanges(words)
    return _in_chunks(words, lambda chunk: _by_block(_exchanged(chunk, exchanges), _CODES))


def to_planes(words: Tensor) -> Tensor:
    """Codes -> planes."""
    exchanges = _exchanges(words)[::-1]
    return _in_chunks(words, lambda chunk: _exchanged(_by_block(chunk, _PLANES), exchanges))


def to_grid(words: Tensor) -> Tensor:
    """Planes, two or at least four -> numbers of as many bits."""
    exchanges = _HALVES_TURNED.get(words.shape[-2], _IN_BYTES)
    return _in_chunks(words, lambda chunk: _stacked(_numbers(_exchanged(chunk, exchanges).unbind(-2))))


def grid_to_planes(words: Tensor) -> Tensor:
    """Inverse of to_grid."""
    exchanges = _HALVES_TURNED.get(words.shape[-2], _IN_BYTES)[::-1]
    return _in_chunks(words, lambda chunk: _exchanged(_stacked(_numbered_planes(chunk.unbind(-2))), exchanges))


def _exchanges(words: Tensor) -> tuple[tuple[int, int], ...]:
    return _EXCHANGES[min(words.shape[-2], max(_EXCHANGES))]


def _in_chunks(words: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = torch.empty_like(words, memory_format=torch.contiguous_format)
    chunk = max(1, _CHUNK_WORDS * len(words) // max(1, words.numel()))
    for source, target in zip(words.split(chunk), changed.split(chunk), strict=True):
        target.copy_(change(source))
    return changed


def _exchanged(words: Tensor, exchanges: Sequence[tuple[int, int]]) -> Tensor:
    """Columns with two bits of their number exchanged, pair after pair; each is its own inverse."""
    lanes = list(words.unflatten(-1, (-1, _QUADS, _QUADS)).unbind(-2))  # [.., rows of eight, a lane's four words]
    for high, low in exchanges:
        if high >= _PLACE_BITS:
            distance, mask = 1 << low, _places(low, set_=False)
            for first in (lane for lane in range(_QUADS) if not lane >> (high - _PLACE_BITS) & 1):
                second = first + (1 << (high - _PLACE_BITS))
                moved = (lanes[first] >> distance ^ lanes[second]) & mask
                lanes[first], lanes[second] = lanes[first] ^ moved << distance, lanes[second] ^ moved
        else:
            distance = (1 << high) - (1 << low)
            mask = _places(low, set_=True) & _places(high, set_=False)
            for lane, word in enumerate(lanes):
                moved = (word >> distance ^ word) & mask
                lanes[lane] = word ^ moved ^ moved << distance
    return torch.stack(lanes, -2).flatten(-3)


def _places(bit: int, *, set_: bool) -> int:
    """The places of a word whose number has this bit, or has not, as an int32."""
    mask = sum(1 << place for place in range(_WORD_BITS) if bool(place >> bit & 1) == set_)
    return mask - (1 << _WORD_BITS) if mask >> (_WORD_BITS - 1) else mask


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


def _nibbles(planes: Sequence[Tensor], s: int, ones: int = _NIBBLE_ONES) -> Tensor:
    """Bit i of nibble m: plane i at column 4 m + s; of byte m at 8 m + s where ones are those of bytes."""
    return reduce(or_, [(plane >> s & ones) << i for i, plane in enumerate(planes)])


def _plane(codes: Sequence[Tensor], i: int, ones: int = _NIBBLE_ONES) -> Tensor:
    """Inverse of _nibbles for plane i, of as many words as there are."""
    return reduce(or_, [(code >> i & ones) << s for s, code in enumerate(codes)])


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


def _numbers(planes: Sequence[Tensor]) -> list[Tensor]:
    """Words of kernels/bcq/level_codes.cuh: of two, four or eight bits, else of four and of those above."""
    if len(planes) in _HALVES_TURNED:
        codes = _two_codes(planes) if len(planes) == 2 else [_nibbles(planes, s) for s in range(_BLOCK_PLANES)]
        return [(word & _HIGHEST_15) << 1 | (word >> 15 & _LOWEST) for word in codes]
    if len(planes) == BITS_PER_BYTE:
        return [_nibbles(planes, s, _BYTE_ONES) for s in range(BITS_PER_BYTE)]
    low, high = planes[:_BLOCK_PLANES], planes[_BLOCK_PLANES:]
    pairs = _two_codes(high[:2]) if len(high) > 1 else []
    return [*(_nibbles(low, s) for s in range(_BLOCK_PLANES)), *pairs, *high[len(pairs) :]]


def _numbered_planes(words: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of _numbers."""
    if len(words) in _HALVES_TURNED:
        codes = [(word >> 1 & _HIGHEST_15) | (word & _LOWEST) << 15 for word in words]
        return _two_planes(codes) if len(codes) == 2 else [_plane(codes, i) for i in range(_BLOCK_PLANES)]
    if len(words) == BITS_PER_BYTE:
        return [_plane(words, i, _BYTE_ONES) for i in range(BITS_PER_BYTE)]
    low, high = words[:_BLOCK_PLANES], words[_BLOCK_PLANES:]
    pairs = _two_planes(high[:2]) if len(high) > 1 else []
    return [*(_plane(low, i) for i in range(_BLOCK_PLANES)), *pairs, *high[len(pairs) :]]


def _stacked(words: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(words), -2)


_CODES: dict[int, _Change] = {1: _same, 2: _two_codes, 3: _three_codes, 4: _four_codes}
_PLANES: dict[int, _Change] = {1: _same, 2: _two_planes, 3: _three_planes, 4: _four_planes}
