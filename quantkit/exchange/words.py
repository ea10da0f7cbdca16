"""Codes of 1 to 8 bits packed into 32-bit words, as other tools store them.

A dense stream puts code i at bit i * bits, counted from the least significant bit of the first word: GPTQ,
compressed-tensors, Humming and MLX. Codes of 3, 5, 6 and 7 bits run over the ends of words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.formats.planes import pack_bits, unpack_bits

WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column _AWQ_ORDER[i] of its eight
AWQ_BITS = 4
_AWQ_CODES = WORD_BITS // AWQ_BITS


def stream_words(codes: int, bits: int) -> int:
    """Words that a dense stream of this many codes takes."""
    return -(-codes * bits // WORD_BITS)


def unpack_stream(words: Tensor, bits: int, codes: int) -> Tensor:
    """Words [R, W] int32 of a dense stream along the last dimension -> [R, codes] uint8."""
    stream = unpack_bits(words.contiguous().view(torch.uint8), codes * bits).unflatten(-1, (codes, bits))
    unpacked = stream[..., 0].clone()
    for i in range(1, bits):
        unpacked |= stream[..., i] << i
    return unpacked


def pack_stream(codes: Tensor, bits: int) -> Tensor:
    """Inverse of unpack_stream: [R, C] of values below 2**bits -> [R, ceil(C * bits / 32)] int32."""
    codes = codes.to(torch.uint8)
    stream = torch.stack([(codes >> i) & 1 for i in range(bits)], dim=-1).flatten(-2)
    padded = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % WORD_BITS))
    return pack_bits(padded).view(torch.int32)


def unpack_padded(words: Tensor, bits: int, codes: int) -> Tensor:
    """As unpack_stream for words of 32 // bits whole codes each, the bits above them unused."""
    per_word = WORD_BITS // bits
    shifts = torch.arange(per_word, dtype=torch.int32) * bits
    unpacked = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return unpacked.to(torch.uint8).flatten(-2)[..., :codes]


def unpack_awq(words: Tensor) -> Tensor:
    """Words [R, W] int32 of eight interleaved nibbles -> [R, 8 W] uint8."""
    nibbles = unpack_stream(words, AWQ_BITS, words.shape[-1] * _AWQ_CODES).unflatten(-1, (-1, _AWQ_CODES))
    codes = torch.empty_like(nibbles)
    codes[..., list(_AWQ_ORDER)] = nibbles
    return codes.flatten(-2)


def pack_awq(codes: Tensor) -> Tensor:
    """Inverse of unpack_awq."""
    return pack_stream(codes.unflatten(-1, (-1, _AWQ_CODES))[..., list(_AWQ_ORDER)].flatten(-2), AWQ_BITS)
