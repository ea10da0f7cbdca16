from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.formats.planes import pack_bits, pack_codes, packed_width, unpack_bits, unpack_codes, unpack_signs


def test_pack_bits_puts_the_first_column_in_the_lowest_bit() -> None:
    bits = torch.tensor([[1, 0, 0, 0, 0, 0, 0, 0, 0, 1]])
    assert pack_bits(bits).tolist() == [[0b00000001, 0b00000010]]


@given(columns=st.integers(1, 70), rows=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_unpack_bits_inverts_pack_bits(columns: int, rows: int, seed: int) -> None:
    bits = torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_bits(bits)
    assert packed.shape == (rows, packed_width(columns))
    assert torch.equal(unpack_bits(packed, columns), bits)


@given(columns=st.integers(1, 70), bits=st.integers(1, 8), seed=st.integers(0, 2**16))
def test_unpack_codes_inverts_pack_codes(columns: int, bits: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (3, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    planes = pack_codes(codes, bits)
    assert planes.shape == (bits, 3, packed_width(columns))
    assert torch.equal(unpack_codes(planes, columns), codes)


def test_padding_bits_behind_the_last_column_are_zero() -> None:
    assert pack_bits(torch.ones(1, 3)).item() == 0b111


@pytest.mark.parametrize("shifted", [False, True], ids=["looked-up", "shifted"])
def test_signs_are_one_where_the_bit_is_set(shifted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = torch.randint(0, 2, (3, 21), dtype=torch.uint8)
    packed = pack_bits(bits)
    monkeypatch.setattr(torch.Tensor, "is_cuda", shifted)
    signs = unpack_signs(packed, 21)
    assert signs.dtype == torch.float32
    assert torch.equal(signs, bits.float() * 2 - 1)
