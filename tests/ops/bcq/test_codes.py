"""Sign words as codes: read as kernels/bcq/levels.cuh reads them, they meet x as kernels/bcq/level_codes.cuh draws."""

from itertools import product

import pytest
import torch
from torch import Tensor

from quantkit.ops.bcq import codes as module
from quantkit.ops.bcq.codes import grid_to_planes, to_codes, to_grid, to_planes
from quantkit.ops.bcq.instances import TILE_K, segment_width
from quantkit.ops.bcq.layout import tile_counts
from quantkit.ops.bcq.order import GRID_PLANES, Order
from tests.ops.bcq.cases import random_weight

BITS = range(1, 9)
NIBBLE_ONES, NIBBLE_LOWS, EVEN_PAIRS = 0x11111111, 0x77777777, 0x33333333
FP32_RTOL = 2.0**-22  # scales are stored in fp16; the weight is rebuilt in fp32, and multiplied in fp64


def _words(bits: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(-(2**31), 2**31, (3, 2, bits, 128), dtype=torch.int64).to(torch.int32)


def _bit(word: Tensor, place: int) -> Tensor:
    return word >> place & 1


@pytest.mark.parametrize("bits", BITS)
def test_planes_come_back(bits: int) -> None:
    words = _words(bits)
    assert torch.equal(to_planes(to_codes(words)), words)


@pytest.mark.parametrize("bits", GRID_PLANES)
def test_planes_come_back_from_a_grid(bits: int) -> None:
    words = _words(bits)
    assert torch.equal(grid_to_planes(to_grid(words)), words)


def test_chunks_are_converted_like_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    words = _words(4)
    whole = to_codes(words)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 2 * 4 * 128)  # an n tile at once
    assert torch.equal(to_codes(words), whole)
    assert torch.equal(to_planes(whole), words)


@pytest.mark.parametrize("bits", BITS)
def test_codes_take_other_bits_in_no_more_words(bits: int) -> None:
    codes = to_codes(_words(bits))
    assert codes.shape == (3, 2, bits, 128)
    assert codes.dtype == torch.int32
    assert codes.is_contiguous()


def _selector(words: list[Tensor], s: int) -> Tensor:
    """PlaneBlock::selector."""
    if len(words) == 1:
        return words[0] >> s & NIBBLE_ONES
    if len(words) == 2:
        return words[s % 2] >> (s // 2 * 2) & EVEN_PAIRS
    if len(words) == 3 and s == 3:
        third = words[1] >> 2 & NIBBLE_ONES << 1 | words[2] >> 1 & NIBBLE_ONES << 2
        return words[0] >> 3 & NIBBLE_ONES | third
    return words[s] & NIBBLE_LOWS


def _block_signs(words: list[Tensor], s: int, nibble: int) -> list[Tensor]:
    """expandBlock: of each plane, the sign at a nibble of word s."""
    found = [_bit(_selector(words, s), 4 * nibble + i) for i in range(min(len(words), 3))]
    if len(words) < 4:
        return found
    positive = 1 - _bit(words[s] if nibble < 4 else words[s] << 4, 8 * (nibble % 4) + 7)
    return [positive, *(1 - (agrees ^ positive) for agrees in found)]


def _pair_signs(words: list[Tensor], s: int, i: int, e: int) -> list[Tensor]:
    """PlaneWords::expand: of each plane, the sign at element e of pair i of word s of a lane."""
    if len(words) == 1:
        return [_bit(words[0] << (15 - 4 * s - i) if 4 * s + i <= 15 else words[0], 15 + 16 * e)]
    if len(words) == 2:
        place, byte = 2 * s + i // 2, 2 * (i % 2) + e
        code = words[place // 4] >> place % 4 * 2 >> 8 * byte
        return [_bit(code, 0), _bit(code, 1)]
    blocks = [block for block in (words[:4], words[4:]) if block]
    return [sign for block in blocks for sign in _block_signs(block, s, 2 * i + e)]


def _lanes(words: Tensor) -> Tensor:
    """[n tiles, k tiles, bits, 128] -> [.., 8, lane of four, half, half of the rows], as unsigned numbers."""
    return (words.long() & 0xFFFFFFFF).unflatten(-1, (8, 4, 2, 2))


@pytest.mark.parametrize("bits", BITS)
def test_a_lane_holds_the_columns_whose_products_it_makes(bits: int) -> None:
    planes, codes = _lanes(_words(bits)), _lanes(to_codes(_words(bits)))
    for t, s, i, e in product(range(4), range(4), range(4), range(2)):
        signs = _pair_signs(list(codes[..., t, :, :].unbind(2)), s, i, e)
        assert len(signs) == bits
        for plane, sign in enumerate(signs):  # column 32 s + 8 i + 2 t + e of the half, as planes stand
            assert torch.equal(sign, _bit(planes[:, :, plane, :, s], 8 * i + 2 * t + e)), (t, s, i, e)


def _byte_number(words: list[Tensor], s: int, b: int) -> Tensor:
    """bytesOf in kernels/bcq/grid.cuh."""
    bits, ones = len(words), 0x01010101
    if bits == 8:
        return words[4 * b + s]
    number = words[s] >> 4 * b & 15 * ones
    if bits > 5:
        number = number | (words[4 + s % 2] >> 4 * b + s // 2 * 2 & 3 * ones) << 4
    if bits in (5, 7):
        number = number | (words[-1] >> 4 * b + s & ones) << bits - 1
    return number


def _grid_number(words: list[Tensor], s: int, i: int, e: int) -> Tensor:
    """GridWords::expand: what stands under the exponent of element e of pair i of word s of a lane."""
    bits = len(words)
    if bits > 4:
        return _byte_number(words, s, i // 2) >> 8 * (i % 2 + 2 * e) & 0xFF
    word, place = words[s * bits // 4], s % (4 // bits) * 2 + i % 2
    turned = (word & 0x00FF00FF) << 8 | word >> 8 & 0x00FF00FF
    return (turned if i > 1 else word) >> (16 * e + 1 + bits * place) & (1 << bits) - 1


@pytest.mark.parametrize("bits", GRID_PLANES)
def test_a_lane_holds_the_numbers_of_a_grid_whose_products_it_makes(bits: int) -> None:
    planes, grid = _lanes(_words(bits)), _lanes(to_grid(_words(bits)))
    for t, s, i, e in product(range(4), range(4), range(4), range(2)):
        number = _grid_number(list(grid[..., t, :, :].unbind(2)), s, i, e)
        signs = [_bit(planes[:, :, plane, :, s], 8 * i + 2 * t + e) for plane in range(bits)]
        assert torch.equal(number, sum(sign << plane for plane, sign in enumerate(signs))), (t, s, i, e)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("group_size", [32, 64, 96, 128, -1], ids="g{}".format)
def test_codes_times_x_as_it_is_give_the_product(bits: int, group_size: int) -> None:
    """x behind each other as in memory, and the levels of the segment that a word of 32 columns is in."""
    torch.manual_seed(bits)
    weight = random_weight(bits, 19, 600, group_size, offset=True)
    tiles = weight.tiled(Order.CODES)
    n_tiles, k_tiles = tile_counts(19, 600)
    x = torch.cat([torch.randn(600), torch.zeros(k_tiles * TILE_K - 600)]).double()
    codes, scales = _lanes(tiles.tiles), tiles.scale_tiles.double()
    segment = TILE_K if group_size == -1 else segment_width(group_size)
    y = torch.zeros(n_tiles, 8, 2, dtype=torch.float64)  # rows g and g + 8
    for k_tile, word in product(range(k_tiles), range(8)):
        part = k_tile * (TILE_K // segment) + word * (TILE_K // segment) // 8
        group = 0 if group_size == -1 else min(part * segment // group_size, tiles.groups - 1)
        level = scales[:, group]  # [n tiles, 8, entries, 2]
        for t, i, e in product(range(4), range(4), range(2)):
            signs = _pair_signs(list(codes[:, k_tile, :, :, t, word // 4].unbind(1)), word % 4, i, e)
            value = level[:, :, bits] + sum(level[:, :, p] * (2 * sign - 1) for p, sign in enumerate(signs))
            y += value * x[k_tile * TILE_K + 32 * word + 8 * i + 2 * t + e]
    got = y.transpose(1, 2).reshape(-1)[:19]
    expected = weight.dequantized() @ x[:600]
    assert (got - expected).norm() <= FP32_RTOL * expected.norm()
