"""Which instances of the trellis format's kernels exist."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.cuda.architectures import Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.launch import DTYPE_CODES
from quantkit.cuda.source import KernelSource
from quantkit.formats.trellis import BLOCK_ROWS, MOST_BITS, MOST_TAPS
from quantkit.ops.bcq.instances import TILE_K, TILE_N
from quantkit.ops.constants import SHARED_CONSTANTS

FILTER_RINGS = 4  # of a block; a thread has two rows of them
FILTER_ROWS = FILTER_RINGS * BLOCK_ROWS
FILTER_THREADS = FILTER_ROWS // 2
DEQUANTIZE_THREADS = TILE_K // 2

_FILTER = KernelSource(
    "trellis/filter.cu",
    {**SHARED_CONSTANTS, "BLOCK_ROWS": BLOCK_ROWS, "FILTER_RINGS": FILTER_RINGS, "MOST_TAPS": MOST_TAPS},
)
_DEQUANTIZE = KernelSource(
    "trellis/dequantize.cu", {**SHARED_CONSTANTS, "BLOCK_ROWS": BLOCK_ROWS, "TILE_N": TILE_N, "TILE_K": TILE_K}
)


def filter_unit(dtype: torch.dtype, bits: int) -> CompileUnit:
    """trellisFilter for fp16 or bf16."""
    return CompileUnit(_FILTER, "trellisFilter", (DTYPE_CODES[dtype], bits))


def dequantize_unit(bits: int) -> CompileUnit:
    """trellisDequantize."""
    return CompileUnit(_DEQUANTIZE, "trellisDequantize", (bits,))


def trellis_units(_row: Architecture) -> Iterator[CompileUnit]:
    """Every instance; the same on every GPU."""
    for bits in range(1, MOST_BITS + 1):
        yield from (filter_unit(dtype, bits) for dtype in (torch.float16, torch.bfloat16))
        yield dequantize_unit(bits)
