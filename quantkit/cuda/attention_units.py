"""Which instances of the INT8 attention kernels exist."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.cuda.units import CompileUnit

HEAD_DIMS = (64, 96, 128, 256)
"""Widths of a head that kernels are made for; others are filled up with zeros to the next of them."""

TILE_KEYS = 64
THREADS, QUANTIZE_THREADS = 128, 256
BOOL_MASK = 3  # element type of a mask, behind those of quantkit.cuda.launch
MOST_KEYS = 2**31 // 127**2  # the largest codes of so many still sum within int32
_WIDE = 128  # wider heads have half the rows per warp, and two stages


def block_rows(head_dim: int) -> int:
    """Rows of Q that a block of int8Attention makes."""
    return TILE_KEYS * (2 if head_dim <= _WIDE else 1)


def shared_bytes(head_dim: int) -> int:
    """Dynamic shared memory of a block of int8Attention: its stages of one tile of K and V."""
    return (3 if head_dim <= _WIDE else 2) * 2 * TILE_KEYS * head_dim


def attention_unit(head_dim: int) -> CompileUnit:
    """int8Attention for one of HEAD_DIMS."""
    return CompileUnit("int8_attention.cu", "int8Attention", (head_dim,))


def quantize_unit(head_dim: int) -> CompileUnit:
    """int8AttentionQuantize for one of HEAD_DIMS."""
    return CompileUnit("int8_attention_quantize.cu", "int8AttentionQuantize", (head_dim,))


def attention_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every INT8 attention instance; the same on every GPU."""
    for head_dim in HEAD_DIMS:
        yield from (attention_unit(head_dim), quantize_unit(head_dim))
