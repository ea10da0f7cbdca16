"""Which instances of the flatten and INT8 kernels exist, and which tile a problem takes on warpgroup products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.cuda.capability import INT4_MMA, INT8_WGMMA, Support, support
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import shared_limit

BLOCK_ROWS, LINE_BYTES = 64, 128
ROWS, BYTE_TILES, NIBBLE_TILES = 0, 1, 2
"""Layouts of kernels/flatten/quantize.cu."""

MMA_TILE_ROWS = 128
DTYPES = 3
_REQUANTIZED_DTYPES = 2  # fp16 and bf16: what y can be where it goes on as codes
_BLOCK_BYTES = BLOCK_ROWS * LINE_BYTES
_SHARED_BYTES = shared_limit(9, 0)
_SHARED_ALIGNMENT = 1024
_STATIC_BYTES = 22784  # barriers, biases, and what codes for the next layer take (int8_requantize.cuh)
_MAX_STAGES = 8
_STEPS = 4  # products per line of 128 bytes
_L2_BYTES_PER_CLOCK = 40  # per SM where all copy, and what one SM can take
_SM_BYTES_PER_CLOCK = 64
_EPILOGUE_CLOCKS = 16  # per column of W of a tile
_MMA_STAGES = 3  # 32 KiB each: fits sm_86 and sm_89


@dataclass(frozen=True)
class GemmTile:
    """Shape of one instance of int8_gemm_wgmma: ``columns`` rows of W, and 64 rows of x per consumer warpgroup."""

    columns: int
    consumers: int

    @property
    def rows(self) -> int:
        """Rows of x in a tile."""
        return self.consumers * BLOCK_ROWS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one k tile of both operands."""
        return (self.rows + self.columns) * LINE_BYTES

    @property
    def stages(self) -> int:
        """k tiles in flight."""
        return min(_MAX_STAGES, (_SHARED_BYTES - _SHARED_ALIGNMENT - _STATIC_BYTES) // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return _SHARED_ALIGNMENT + self.stages * self.stage_bytes

    def count(self, rows: int, channels: int) -> tuple[int, int]:
        """Tiles of y [rows, channels] along x and along W."""
        return -(-rows // self.rows), -(-channels // self.columns)

    def clocks(self, k_tiles: int, busy: float) -> float:
        """Clocks of one tile: of its products, or of its copies where those take longer, and of its epilogue.

        busy: share of the SMs that copy at the same time.
        """
        products = _STEPS * self.consumers * self.columns / 2
        copies = self.stage_bytes / min(_SM_BYTES_PER_CLOCK, _L2_BYTES_PER_CLOCK / busy)
        return k_tiles * max(products, copies) + _EPILOGUE_CLOCKS * self.columns


GEMM_TILES = (GemmTile(256, 2), GemmTile(128, 2), GemmTile(128, 1), GemmTile(64, 1))
"""The one for large problems first."""


def best_tile(rows: int, channels: int, k_tiles: int, processors: int) -> GemmTile:
    """The tile with the fewest clocks for y [rows, channels]; of equals the one with the most reuse."""

    def clocks(tile: GemmTile) -> float:
        along_x, along_w = tile.count(rows, channels)
        tiles = along_x * along_w
        return -(-tiles // processors) * tile.clocks(k_tiles, min(1.0, tiles / processors))

    return min(GEMM_TILES, key=clocks)


def quantize_unit(layout: int, dtype: int, staged: bool) -> CompileUnit:
    """flatten_quantize into a layout from an element type (a code of quantkit.cuda.launch)."""
    return CompileUnit("flatten/quantize.cu", "flattenQuantize", (layout, dtype, staged))


def wgmma_unit(tile: GemmTile, dtype: int, requantize: bool = False) -> CompileUnit:
    """int8_gemm_wgmma for a tile and an element type of y, which goes on as codes if ``requantize``."""
    arguments = (tile.columns, tile.consumers, tile.stages, dtype, requantize)
    return CompileUnit("flatten/int8_gemm_wgmma.cu", "int8GemmWgmma", arguments, hopper=True)


def mma_unit(bits: int, dtype: int, requantize: bool = False) -> CompileUnit:
    """int8_gemm_mma for operands of 8 or 4 bits and an element type of y, which goes on as codes if ``requantize``."""
    return CompileUnit("flatten/int8_gemm_mma.cu", "int8GemmMma", (bits, _MMA_STAGES, dtype, requantize))


def mma_shared_bytes() -> int:
    """Dynamic shared memory of a block of int8_gemm_mma."""
    return _MMA_STAGES * 4 * _BLOCK_BYTES


EXPAND = CompileUnit("flatten/int8_expand.cu", "int8Expand")


def flatten_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every flatten and INT8 instance that can be asked for on a GPU of this compute capability."""
    yield EXPAND
    native_int4 = support(INT4_MMA, major, minor) is Support.NATIVE
    for dtype in range(DTYPES):
        for staged in (True, False):
            yield from (quantize_unit(layout, dtype, staged) for layout in (ROWS, BYTE_TILES))
            if native_int4:
                yield quantize_unit(NIBBLE_TILES, dtype, staged)
        for requantize in (False, True)[: 1 + (dtype < _REQUANTIZED_DTYPES)]:
            if support(INT8_WGMMA, major, minor) is Support.NATIVE:
                yield from (wgmma_unit(tile, dtype, requantize) for tile in GEMM_TILES)
            yield from (mma_unit(bits, dtype, requantize) for bits in ((8, 4) if native_int4 else (8,)))
