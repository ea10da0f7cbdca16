"""Sign words as codes: kernels/bcq/level_codes.cuh draws them."""

import pytest
import torch
from torch import Tensor

from quantkit.ops.bcq.codes import to_codes, to_planes

BITS = range(1, 9)


def _words(bits: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randint(-(2**31), 2**31, (3, bits, 128), dtype=torch.int64).to(torch.int32)


def _bit(word: Tensor, place: int) -> Tensor:
    return word >> place & 1


@pytest.mark.parametrize("bits", BITS)
def test_planes_come_back(bits: int) -> None:
    words = _words(bits)
    assert torch.equal(to_planes(to_codes(words)), words)


@pytest.mark.parametrize("bits", BITS)
def test_codes_take_other_bits_in_no_more_words(bits: int) -> None:
    codes = to_codes(_words(bits))
    assert codes.shape == (3, bits, 128)
    assert codes.dtype == torch.int32


def test_four_planes_follow_the_drawing() -> None:
    planes, codes = _words(4).unbind(-2), to_codes(_words(4)).unbind(-2)
    for s in range(4):
        for m in range(8):
            column = 4 * m + s
            first = _bit(planes[0], column)
            for i in range(3):
                assert torch.equal(_bit(codes[s], 4 * m + i), 1 - (_bit(planes[i + 1], column) ^ first))
            place = 8 * m + 7 if m < 4 else 8 * (m - 4) + 3
            assert torch.equal(_bit(codes[s], place), 1 - first)


def test_two_planes_follow_the_drawing() -> None:
    planes, codes = _words(2).unbind(-2), to_codes(_words(2)).unbind(-2)
    for e in range(2):
        for j in range(16):
            for i in range(2):
                assert torch.equal(_bit(codes[e], 2 * j + i), _bit(planes[i], 2 * j + e))
