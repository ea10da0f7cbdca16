"""Which instances of the flatten and INT8 kernels exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.cuda.architectures import WARP_THREADS, WARPGROUP_THREADS, Architecture, Kernel, architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.source import KernelSource
from quantkit.ops.bipolar.layout import BLOCK_ROWS, CHUNK_BYTES, LINE_BYTES, ORDER_ROWS
from quantkit.ops.constants import SHARED_CONSTANTS

ROW_MAJOR, BYTE_TILES, NIBBLE_TILES = 0, 1, 2
"""Layouts of codes that flatten_quantize writes."""

MMA_TILE_ROWS = 128
"""Rows of either operand in a tile of int8_gemm_mma."""

_MMA_WARPS = 8
MMA_THREADS, EXPAND_THREADS, QUANTIZE_THREADS = _MMA_WARPS * WARP_THREADS, 256, 512
"""Of a block; of flatten_quantize at most."""

ROW_ALIGNMENT = 16
"""Bytes that a row of x is aligned to in shared memory."""

_DTYPES = 3
_REQUANTIZED_DTYPES = 2  # fp16 and bf16: what y can be where it goes on as codes
_SHARED_BYTES = architecture(9, 0).shared_limit()
_SHARED_ALIGNMENT = 1024
_STATIC_BYTES = 24832  # barriers, scales, biases, and what codes for the next layer take (int8_requantize.cuh)
_MAX_STAGES = 8
_STEPS = 4  # products per line of 128 bytes
_L2_BYTES_PER_CLOCK = 40  # per SM where all copy, and what one SM can take
_SM_BYTES_PER_CLOCK = 64
_EPILOGUE_CLOCKS = 16  # per row of W of a tile
_MMA_STAGES = 3  # 32 KiB each: fits sm_86 and sm_89

_CONSTANTS = {
    **SHARED_CONSTANTS,
    "BLOCK_ROWS": BLOCK_ROWS,
    "LINE_BYTES": LINE_BYTES,
    "CHUNK_BYTES": CHUNK_BYTES,
    "ORDER_ROWS": ORDER_ROWS,
    "ROW_MAJOR": ROW_MAJOR,
    "BYTE_TILES": BYTE_TILES,
    "NIBBLE_TILES": NIBBLE_TILES,
    "ROW_ALIGNMENT": ROW_ALIGNMENT,
    "MMA_TILE_ROWS": MMA_TILE_ROWS,
    "MMA_WARPS": _MMA_WARPS,
    "EXPAND_THREADS": EXPAND_THREADS,
    "QUANTIZE_THREADS": QUANTIZE_THREADS,
    "SHARED_ALIGNMENT": _SHARED_ALIGNMENT,
}
_WGMMA = KernelSource("flatten/int8_gemm_wgmma.cu", _CONSTANTS)
_MMA = KernelSource("flatten/int8_gemm_mma.cu", _CONSTANTS)
_QUANTIZE = KernelSource("flatten/quantize.cu", _CONSTANTS)


@dataclass(frozen=True)
class GemmTile:
    """Shape of one instance of int8_gemm_wgmma: ``rows_w`` rows of W, and 64 rows of x per consumer warpgroup."""

    rows_w: int
    consumers: int

    @property
    def rows_x(self) -> int:
        """Rows of x in a tile."""
        return self.consumers * BLOCK_ROWS

    @property
    def threads(self) -> int:
        """Of a block: the consumers and a producer."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one k tile of both operands."""
        return (self.rows_x + self.rows_w) * LINE_BYTES

    @property
    def stages(self) -> int:
        """k tiles in flight."""
        return min(_MAX_STAGES, (_SHARED_BYTES - _SHARED_ALIGNMENT - _STATIC_BYTES) // self.stage_bytes)

    def count(self, m: int, n: int) -> tuple[int, int]:
        """Tiles of y [m, n] along x and along W."""
        return -(-m // self.rows_x), -(-n // self.rows_w)

    def clocks(self, k_tiles: int, busy: float) -> float:
        """Clocks of one tile: of its products, or of its copies where those take longer, and of its epilogue.

        busy: share of the SMs that copy at the same time.
        """
        products = _STEPS * self.consumers * self.rows_w / 2
        copies = self.stage_bytes / min(_SM_BYTES_PER_CLOCK, _L2_BYTES_PER_CLOCK / busy)
        return k_tiles * max(products, copies) + _EPILOGUE_CLOCKS * self.rows_w


GEMM_TILES = (GemmTile(256, 2), GemmTile(128, 2), GemmTile(128, 1), GemmTile(64, 1))
"""The one for large problems first."""


def quantize_unit(layout: int, dtype: int, staged: bool) -> CompileUnit:
    """flatten_quantize into a layout from an element type (a code of quantkit.cuda.launch)."""
    return CompileUnit(_QUANTIZE, "flattenQuantize", (layout, dtype, staged))


def wgmma_unit(tile: GemmTile, dtype: int, requantize: bool = False) -> CompileUnit:
    """int8_gemm_wgmma for a tile and an element type of y, which goes on as codes if ``requantize``."""
    arguments = (tile.rows_w, tile.consumers, tile.stages, dtype, requantize)
    return CompileUnit(_WGMMA, "int8GemmWgmma", arguments, _SHARED_ALIGNMENT + tile.stages * tile.stage_bytes)


def mma_unit(bits: int, dtype: int, requantize: bool = False) -> CompileUnit:
    """int8_gemm_mma for operands of 8 or 4 bits and an element type of y, which goes on as codes if ``requantize``."""
    shared_mem = _MMA_STAGES * 2 * MMA_TILE_ROWS * LINE_BYTES
    return CompileUnit(_MMA, "int8GemmMma", (bits, _MMA_STAGES, dtype, requantize), shared_mem)


EXPAND = CompileUnit(KernelSource("flatten/int8_expand.cu", _CONSTANTS), "int8Expand")


def flatten_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every flatten and INT8 instance that can be asked for on a GPU generation."""
    yield EXPAND
    native_int4 = Kernel.INT4_GEMM_MMA in row.kernels
    layouts = (ROW_MAJOR, BYTE_TILES, NIBBLE_TILES) if native_int4 else (ROW_MAJOR, BYTE_TILES)
    for dtype in range(_DTYPES):
        yield from (quantize_unit(layout, dtype, staged) for staged in (True, False) for layout in layouts)
        for requantize in (False, True)[: 1 + (dtype < _REQUANTIZED_DTYPES)]:
            if Kernel.INT8_GEMM_WGMMA in row.kernels:
                yield from (wgmma_unit(tile, dtype, requantize) for tile in GEMM_TILES)
            if Kernel.INT8_GEMM_MMA in row.kernels:
                yield from (mma_unit(bits, dtype, requantize) for bits in ((8, 4) if native_int4 else (8,)))
