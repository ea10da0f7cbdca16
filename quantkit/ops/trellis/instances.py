"""Which instances of the trellis format's kernels exist."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quantkit.cuda.architectures import WARP_THREADS, Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.launch import DTYPE_CODES
from quantkit.cuda.source import KernelSource
from quantkit.formats.trellis import BLOCK_ROWS, MOST_BITS, MOST_TAPS, MOST_WINDOW_BITS
from quantkit.ops.bcq.instances import TILE_K, TILE_N
from quantkit.ops.constants import SHARED_CONSTANTS

FILTER_RINGS = 4  # of a block; a thread has two rows of them
FILTER_ROWS = FILTER_RINGS * BLOCK_ROWS
FILTER_THREADS = FILTER_ROWS // 2
DEQUANTIZE_TILES = 2  # k tiles of a block; a thread has two columns of them
DEQUANTIZE_THREADS = DEQUANTIZE_TILES * TILE_K // 2
_ENTRY_BYTES = 4 * WARP_THREADS

_FILTER = KernelSource(
    "trellis/filter.cu",
    {**SHARED_CONSTANTS, "BLOCK_ROWS": BLOCK_ROWS, "FILTER_RINGS": FILTER_RINGS, "MOST_TAPS": MOST_TAPS},
)
_DEQUANTIZE = KernelSource(
    "trellis/dequantize.cu",
    {
        **SHARED_CONSTANTS,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_TILES": DEQUANTIZE_TILES,
        "MOST_TAPS": MOST_TAPS,
        "TILE_N": TILE_N,
        "TILE_K": TILE_K,
    },
)


def filter_unit(dtype: torch.dtype, bits: int) -> CompileUnit:
    """trellisFilter for fp16 or bf16."""
    return CompileUnit(_FILTER, "trellisFilter", (DTYPE_CODES[dtype], bits))


def dequantize_unit(dtype: torch.dtype, bits: int) -> CompileUnit:
    """trellisDequantize to a type. Its launches take ``dequantize_bytes`` of shared memory."""
    most = dequantize_bytes(bits, min(MOST_TAPS, MOST_WINDOW_BITS // bits))
    return CompileUnit(_DEQUANTIZE, "trellisDequantize", (DTYPE_CODES[dtype], bits), most)


def dequantize_bytes(bits: int, taps: int) -> int:
    """Of the tables of windows, for every lane one."""
    return (bits << taps) * _ENTRY_BYTES


def trellis_units(_row: Architecture) -> Iterator[CompileUnit]:
    """Every instance; the same on every GPU."""
    for bits in range(1, MOST_BITS + 1):
        yield from (filter_unit(dtype, bits) for dtype in (torch.float16, torch.bfloat16))
        yield from (dequantize_unit(dtype, bits) for dtype in DTYPE_CODES)
