"""Which instances of the decoding kernels exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quantkit.cuda.architectures import Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.source import KernelSource
from quantkit.ops.constants import SHARED_CONSTANTS
from quantkit.ops.decode.layout import DTYPE_CODES_TAKEN, HEAD_DIMS, VECTOR_VALUES

NORM_THREADS, ATTENTION_THREADS, GATED_THREADS, ROTARY_THREADS, PROMPT_THREADS = 512, 512, 128, 128, 128
CHOOSE_THREADS = 1024


class AttentionBlock(NamedTuple):
    """A block of attention: heads on one cache that it computes together, and its threads."""

    heads: int
    threads: int


FEW_HEADS, MANY_HEADS = AttentionBlock(1, ATTENTION_THREADS), AttentionBlock(1, 128)
SHARING_BLOCKS = (AttentionBlock(4, 256), AttentionBlock(2, 256))
ATTENTION_BLOCKS = (FEW_HEADS, MANY_HEADS, *SHARING_BLOCKS)

NORM_VECTORS = (1, 2, 4)
"""16-byte vectors of a token per thread of a norm."""
_PASS_VALUES = NORM_THREADS * VECTOR_VALUES
SPLIT_STEP = 64
"""Entries of a split of the cache are a multiple of this."""

_CONSTANTS = {
    **SHARED_CONSTANTS,
    "VECTOR_VALUES": VECTOR_VALUES,
    "NORM_THREADS": NORM_THREADS,
    "ATTENTION_THREADS": ATTENTION_THREADS,
    "GATED_THREADS": GATED_THREADS,
    "ROTARY_THREADS": ROTARY_THREADS,
    "PROMPT_THREADS": PROMPT_THREADS,
    "CHOOSE_THREADS": CHOOSE_THREADS,
    "SPLIT_STEP": SPLIT_STEP,
}
_NORM = KernelSource("decode/norm.cu", _CONSTANTS)
_ROTARY = KernelSource("decode/rotary.cu", _CONSTANTS)
_PROMPT = KernelSource("decode/prompt.cu", _CONSTANTS)
_CHOOSE = KernelSource("decode/choose.cu", _CONSTANTS)
_ATTENTION = KernelSource("decode/attention.cu", _CONSTANTS)


def norm_unit(centered: bool, dtype: int, in_features: int) -> CompileUnit:
    """decodeNorm: LayerNorm (centered) or RMSNorm over up to MOST_NORM_VALUES; dtype: one of DTYPE_CODES_TAKEN."""
    return CompileUnit(_NORM, "decodeNorm", (centered, dtype, norm_vectors(in_features)))


def norm_vectors(in_features: int) -> int:
    """Of NORM_VECTORS the least that hold a token."""
    return next(count for count in NORM_VECTORS if in_features <= count * _PASS_VALUES)


def gated_unit(dtype: int) -> CompileUnit:
    """decodeGated for one of DTYPE_CODES_TAKEN."""
    return CompileUnit(_NORM, "decodeGated", (dtype,))


def rotary_unit(dtype: int) -> CompileUnit:
    """decodeRotate for one of DTYPE_CODES_TAKEN."""
    return CompileUnit(_ROTARY, "decodeRotate", (dtype,))


def prompt_unit(dtype: int) -> CompileUnit:
    """decodePrompt for one of DTYPE_CODES_TAKEN."""
    return CompileUnit(_PROMPT, "decodePrompt", (dtype,))


def choose_unit(dtype: int) -> CompileUnit:
    """decodeChoose for one of DTYPE_CODES_TAKEN."""
    return CompileUnit(_CHOOSE, "decodeChoose", (dtype,))


def attention_unit(head_dim: int, dtype: int, block: AttentionBlock) -> CompileUnit:
    """decodeAttention for one of HEAD_DIMS, of DTYPE_CODES_TAKEN and of ATTENTION_BLOCKS."""
    return CompileUnit(_ATTENTION, "decodeAttention", (head_dim, dtype, block.threads, block.heads))


def combine_unit(head_dim: int, dtype: int) -> CompileUnit:
    """decodeCombine, which adds up the splits of decodeAttention."""
    return CompileUnit(_ATTENTION, "decodeCombine", (head_dim, dtype))


def decode_units(_row: Architecture) -> Iterator[CompileUnit]:
    """Every decoding instance; the same on every GPU."""
    for dtype in DTYPE_CODES_TAKEN:
        for vectors in NORM_VECTORS:
            yield from (norm_unit(centered, dtype, vectors * _PASS_VALUES) for centered in (True, False))
        yield gated_unit(dtype)
        yield rotary_unit(dtype)
        yield prompt_unit(dtype)
        yield choose_unit(dtype)
        for head_dim in HEAD_DIMS:
            yield from (attention_unit(head_dim, dtype, block) for block in ATTENTION_BLOCKS)
            yield combine_unit(head_dim, dtype)
