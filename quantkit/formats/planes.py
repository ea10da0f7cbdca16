"""Bit planes: unsigned codes of 1-8 bits as one packed bit matrix per bit (bit i of every code in plane i)."""

from __future__ import annotations

import torch
from torch import Tensor

BITS_PER_BYTE = 8
MAX_BITS = 8
_SHIFTS = tuple(range(BITS_PER_BYTE))
_LOWEST_BITS = 0x0101010101010101  # of each byte of a 64-bit number
_GATHER = 0x0102040810204080  # times this, they are the number's highest byte, the first byte's bit lowest


def packed_width(columns: int) -> int:
    """Bytes per packed row of ``columns`` bits."""
    return -(-columns // BITS_PER_BYTE)


def pack_bits(bits: Tensor) -> Tensor:
    """Pack 0/1 values along the last dimension, least significant bit first.

    bits: [..., K] bool or integer, values 0 and 1.
    Returns [..., ceil(K / 8)] uint8; bit t of byte b is column 8 b + t; the bits behind column K are 0.
    """
    columns = bits.shape[-1]
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -columns % BITS_PER_BYTE))
    grouped = padded.unflatten(-1, (-1, BITS_PER_BYTE))
    packed = grouped[..., 0].clone()
    for shift in _SHIFTS[1:]:
        packed |= grouped[..., shift] << shift
    return packed


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """Inverse of pack_bits: [..., ceil(columns / 8)] uint8 -> [..., columns] uint8 of 0 and 1."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :columns]


def unpack_signs(packed: Tensor, columns: int) -> Tensor:
    """[..., ceil(columns / 8)] uint8 -> [..., columns] fp32: +1 where the bit is set, else -1.

    One table look-up a byte: five times as fast on a CPU as shifting out each bit, and ten times as slow on a GPU.
    """
    if packed.is_cuda:
        return unpack_bits(packed, columns).float().mul_(2).sub_(1)
    every_byte = torch.arange(2**BITS_PER_BYTE, dtype=torch.uint8, device=packed.device)
    table = unpack_bits(every_byte[:, None], BITS_PER_BYTE).float() * 2 - 1  # [256, 8]
    return table.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], -1)[..., :columns]


def code_signs(codes: Tensor, bits: int) -> list[Tensor]:
    """For each plane i, in the shape of the codes, fp32: +1 where bit i of the code is set, else -1.

    Computed in bytes: in fp32 it takes several times as long on a CPU.
    """
    return [(((codes >> i) & 1).to(torch.int8) * 2 - 1).float() for i in range(bits)]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Split unsigned codes into bit planes.

    codes: [N, K] integer, 0 <= code < 2**bits.
    Returns [bits, N, ceil(K / 8)] uint8, plane i holding bit i.
    """
    padded = torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.shape[-1] % BITS_PER_BYTE))
    eights = padded.contiguous().view(torch.int64)  # eight codes in a number, the first in its lowest byte
    return torch.stack([((((eights >> i) & _LOWEST_BITS) * _GATHER) >> 56).to(torch.uint8) for i in range(bits)])


def unpack_codes(planes: Tensor, columns: int) -> Tensor:
    """Inverse of pack_codes: [bits, N, ceil(columns / 8)] uint8 -> [N, columns] uint8."""
    codes = torch.zeros(*planes.shape[1:-1], columns, dtype=torch.uint8, device=planes.device)
    for i, plane in enumerate(planes):
        codes |= unpack_bits(plane, columns) << i
    return codes
