"""Packed words against bits set by hand, and back again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.exchange.words import (
    pack_awq,
    pack_stream,
    stream_words,
    unpack_awq,
    unpack_padded,
    unpack_stream,
)


def _word(value: int) -> int:
    """An unsigned word as int32 holds it."""
    return value - 2**32 if value >= 2**31 else value


def _by_hand(codes: list[int], bits: int) -> list[int]:
    """The stream as one long integer, cut into words."""
    stream = sum(code << (bits * i) for i, code in enumerate(codes))
    words = -(-len(codes) * bits // 32)
    return [_word((stream >> (32 * i)) & 0xFFFFFFFF) for i in range(words)]


def test_four_bit_word_by_hand() -> None:
    words = torch.tensor([[_word(0xFEDCBA98)]], dtype=torch.int32)
    assert unpack_stream(words, 4, 8).tolist() == [[8, 9, 10, 11, 12, 13, 14, 15]]


def test_three_bit_codes_run_over_the_ends_of_words() -> None:
    # Code 10 has its low two bits at the top of word 0 and its high bit at the bottom of word 1; code 21 likewise.
    words = torch.tensor([[_word(0x80000000), 1 - 2**31, 3]], dtype=torch.int32)
    codes = [0] * 32
    codes[10], codes[21] = 0b110, 0b111
    assert unpack_stream(words, 3, 32).tolist() == [codes]


def test_awq_word_by_hand() -> None:
    # Nibbles from the lowest: columns 0, 2, 4, 6, 1, 3, 5, 7
    words = torch.tensor([[_word(0x75316420)]], dtype=torch.int32)
    assert unpack_awq(words).tolist() == [list(range(8))]


def test_padded_three_bit_word_by_hand() -> None:
    words = torch.tensor([[0b111_110 | 0b101 << 27, 0b001]], dtype=torch.int32)
    assert unpack_padded(words, 3, 12).tolist() == [[6, 7, 0, 0, 0, 0, 0, 0, 0, 5, 1, 0]]


@given(bits=st.integers(1, 8), codes=st.integers(1, 100), seed=st.integers(0, 100))
def test_streams_are_what_long_integers_say_and_come_back(bits: int, codes: int, seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randint(0, 2**bits, (2, codes), dtype=torch.uint8)
    words = pack_stream(values, bits)
    assert words.shape[1] == stream_words(codes, bits)
    assert words.tolist() == [_by_hand(row, bits) for row in values.tolist()]
    assert torch.equal(unpack_stream(words, bits, codes), values)


@given(words=st.integers(1, 9), seed=st.integers(0, 100))
def test_awq_words_come_back(words: int, seed: int) -> None:
    torch.manual_seed(seed)
    values = torch.randint(0, 16, (3, 8 * words), dtype=torch.uint8)
    assert torch.equal(unpack_awq(pack_awq(values)), values)
