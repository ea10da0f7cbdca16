"""Which instances of the decoding kernels exist."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.cuda.compile import CompileUnit

HEAD_DIMS = (64, 128, 256)
DTYPES = (0, 1)  # fp16 and bf16, as kernels/shared/common.cuh numbers them
NORM_THREADS, ATTENTION_THREADS, GATED_THREADS = 512, 512, 128
NORM_VECTORS = (1, 2, 4)  # 16-byte pieces of a row per thread
_PASS_COLUMNS = NORM_THREADS * 8
NORM_COLUMNS = _PASS_COLUMNS * NORM_VECTORS[-1]  # the longest row
SLICE_ENTRIES = 4096  # of a cache, whose scores a block keeps in shared memory
SLICE_STEP = 64  # entries of a slice are a multiple; also in decode_attention.cu


def norm_unit(centered: bool, dtype: int, columns: int) -> CompileUnit:
    """decodeNorm: LayerNorm (centered) or RMSNorm of rows up to NORM_COLUMNS; dtype: one of DTYPES."""
    vectors = next(count for count in NORM_VECTORS if columns <= count * _PASS_COLUMNS)
    return CompileUnit("decode/norm.cu", "decodeNorm", (centered, dtype, vectors))


def attention_unit(head_dim: int, dtype: int) -> CompileUnit:
    """decodeAttention for one of HEAD_DIMS and one of DTYPES."""
    return CompileUnit("decode/attention.cu", "decodeAttention", (head_dim, dtype))


def merge_unit(head_dim: int, dtype: int) -> CompileUnit:
    """decodeMerge of the slices of decodeAttention."""
    return CompileUnit("decode/attention.cu", "decodeMerge", (head_dim, dtype))


def gated_unit(dtype: int) -> CompileUnit:
    """decodeGated for one of DTYPES."""
    return CompileUnit("decode/norm.cu", "decodeGated", (dtype,))


def decode_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every decoding instance; the same on every GPU."""
    for dtype in DTYPES:
        for vectors in NORM_VECTORS:
            yield from (norm_unit(centered, dtype, vectors * _PASS_COLUMNS) for centered in (True, False))
        yield gated_unit(dtype)
        for head_dim in HEAD_DIMS:
            yield from (attention_unit(head_dim, dtype), merge_unit(head_dim, dtype))
