"""Which instances of the decoding kernels exist."""

from __future__ import annotations

from collections.abc import Iterator

from quantkit.cuda.units import CompileUnit

HEAD_DIMS = (64, 128, 256)
NORM_THREADS, ATTENTION_THREADS = 512, 512
NORM_COLUMNS = NORM_THREADS * 4 * 8  # the longest row
ATTENTION_CAPACITY = 8192  # cache entries whose scores a block keeps in shared memory


def norm_unit(centered: bool) -> CompileUnit:
    """decodeNorm: LayerNorm (centered) or RMSNorm."""
    return CompileUnit("decode.cu", "decodeNorm", (centered,))


def attention_unit(head_dim: int) -> CompileUnit:
    """decodeAttention for one of HEAD_DIMS."""
    return CompileUnit("decode.cu", "decodeAttention", (head_dim,))


def decode_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every decoding instance; the same on every GPU."""
    yield from (norm_unit(True), norm_unit(False), *map(attention_unit, HEAD_DIMS))
