"""Which instances of the bipolar kernels exist, and which tiles each pair of widths has on warpgroup products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from quantkit.cuda.architectures import WARP_THREADS, WARPGROUP_THREADS, Architecture, Kernel, architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.source import KernelSource
from quantkit.formats.bipolar import MOST_CODED_BITS
from quantkit.formats.hadamard import SIGN_CONSTANTS
from quantkit.formats.planes import MAX_BITS
from quantkit.ops.bipolar.layout import BLOCK_ROWS, CHUNK_BYTES, LINE_BYTES, ORDER_ROWS
from quantkit.ops.bipolar.product import CODED_LIMIT
from quantkit.ops.constants import SHARED_CONSTANTS

BINARY_LIMIT = 8
"""Plane products at which INT8 draws level: a binary product runs at 8 times the INT8 rate."""

GEMV_PAIRS, GEMV_ROWS = 8, 16
"""(token, plane) pairs of one product of bipolar_gemv, and tile rows of W per block."""

GEMV_GROUPS = (1, 2, 4)
"""Products of so many pairs that a block of bipolar_gemv keeps."""

_GEMV_WARPS, _MMA_WARPS, _EXPAND_WARPS = 8, 8, 8
GEMV_THREADS, MMA_THREADS, EXPAND_THREADS = (n * WARP_THREADS for n in (_GEMV_WARPS, _MMA_WARPS, _EXPAND_WARPS))
QUANTIZE_WARPS = 14
"""Of a block of bipolar_quantize, at most: two such blocks leave each thread 72 registers, which rotating wants."""

_DTYPES = 3
_FLOAT32 = 2
SHARED_ALIGNMENT = 1024
LINE_STRUCT_BYTES, _CORNER_BYTES = 16, 8
LINE_SETS = 2
BARRIER_BYTES = 16  # one that fills and one that empties
_MAX_STAGES = 8
SLAB_TOKENS, _SLAB_PADDING = 32, 16
_STEPS = 4  # products per line: 256 bits or 32 bytes each
_L2_BYTES_PER_CLOCK = 24  # per SM where all copy, as tiles of one plane each were seen to reach on an H200
_SM_BYTES_PER_CLOCK = 64  # what one SM can take
WGMMA_SHARED_BYTES = architecture(9, 0).shared_limit()
_MMA_SHARED_BYTES = architecture(8, 6).shared_limit()  # the smallest
_MMA_MAX_STAGES = 4
# Rows of operand B in a tile where A has one plane: its planes times these are the columns of one product, <= 256.
_FUSED_ROWS = {1: 256, 2: 128, 3: 64, 4: 64, 5: 32, 6: 32, 7: 32, 8: 32}
# Pairs with x as operand A though W has fewer planes: the way to y without a detour outweighs the narrower product.
_UNSWAPPED = ((1, 2),)
# (fewer planes, more planes) where both have several: accumulators for every level must fit the registers.
_LEVEL_ROWS = {(2, 2): 128, (2, 3): 64, (2, 4): 64}

CONSTANTS = {
    **SHARED_CONSTANTS,
    "BLOCK_ROWS": BLOCK_ROWS,
    "LINE_BYTES": LINE_BYTES,
    "CHUNK_BYTES": CHUNK_BYTES,
    "ORDER_ROWS": ORDER_ROWS,
    "SHARED_ALIGNMENT": SHARED_ALIGNMENT,
    "LINE_SETS": LINE_SETS,
    "SLAB_TOKENS": SLAB_TOKENS,
    "SLAB_PADDING": _SLAB_PADDING,
    "GEMV_PAIRS": GEMV_PAIRS,
    "GEMV_ROWS": GEMV_ROWS,
    "GEMV_WARPS": _GEMV_WARPS,
    "MMA_WARPS": _MMA_WARPS,
    "EXPAND_WARPS": _EXPAND_WARPS,
    "QUANTIZE_WARPS": QUANTIZE_WARPS,
    "CODED_LIMIT": CODED_LIMIT,
}
_WGMMA = KernelSource("bipolar/gemm_wgmma.cu", CONSTANTS)
_MMA = KernelSource("bipolar/gemm_mma.cu", CONSTANTS)
_GEMV = KernelSource("bipolar/gemv.cu", CONSTANTS)
_QUANTIZE = KernelSource("bipolar/quantize.cu", CONSTANTS)
_QUANTIZE_ROTATED = KernelSource("bipolar/quantize_rotated.cu", {**CONSTANTS, **SIGN_CONSTANTS})
_EXPAND = KernelSource("bipolar/expand.cu", CONSTANTS)


@dataclass(frozen=True)
class WgmmaTile:
    """Shape of one instance of bipolar_gemm_wgmma, which makes tiles of y from rows of operands A and B.

    planes_w, planes_x: planes per operand (1 and 1 for bytes). swap: operand A is W, else x. rows_b: rows of B in a
    tile. consumers: warpgroups of 64 rows of A.
    """

    as_bytes: bool
    planes_w: int
    planes_x: int
    swap: bool
    rows_b: int
    consumers: int = 2

    @property
    def rows_a(self) -> int:
        """Rows of A in a tile."""
        return self.consumers * BLOCK_ROWS

    @property
    def threads(self) -> int:
        """Of a block: the consumers and a producer."""
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def _planes(self) -> tuple[int, int]:
        """Of operands A and B."""
        return (self.planes_w, self.planes_x) if self.swap else (self.planes_x, self.planes_w)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one k tile of both operands."""
        planes_a, planes_b = self._planes
        return (planes_a * self.rows_a + planes_b * self.rows_b) * LINE_BYTES

    def stage_clocks(self, busy: float) -> float:
        """Clocks of one k tile: of its products, or of its copies from L2 where those take longer.

        busy: share of the SMs that copy at the same time.
        """
        planes_a, planes_b = self._planes
        products = _STEPS * self.rows_a // BLOCK_ROWS * planes_a * planes_b * self.rows_b / 2
        return max(products, self.stage_bytes / min(_SM_BYTES_PER_CLOCK, _L2_BYTES_PER_CLOCK / busy))

    def slab_bytes(self, element_bytes: int) -> int:
        """Shared memory through which results pass where operand A is W."""
        return self.consumers * SLAB_TOKENS * (BLOCK_ROWS * element_bytes + _SLAB_PADDING) if self.swap else 0

    def stages(self, element_bytes: int) -> int:
        """Stages that fit beside slabs and the kernel's static shared memory."""
        lines = (self.rows_a + self.rows_b) * LINE_STRUCT_BYTES + _CORNER_BYTES + BARRIER_BYTES
        static = LINE_SETS * lines + _MAX_STAGES * BARRIER_BYTES
        room = WGMMA_SHARED_BYTES - SHARED_ALIGNMENT - static - self.slab_bytes(element_bytes)
        return min(_MAX_STAGES, room // self.stage_bytes)

    def count(self, m: int, n: int) -> tuple[int, int]:
        """Tiles of y [m, n] along operands A and B."""
        size_a, size_b = (n, m) if self.swap else (m, n)
        return -(-size_a // self.rows_a), -(-size_b // self.rows_b)


def wgmma_tiles(planes_w: int, planes_x: int, as_bytes: bool) -> list[WgmmaTile]:
    """The tiles that exist for a pair of operands, the one for large problems first."""
    fewer, more = sorted((planes_w, planes_x))
    swap = planes_w < planes_x and (planes_w, planes_x) not in _UNSWAPPED
    rows_b = _FUSED_ROWS[more] if fewer == 1 else _LEVEL_ROWS[fewer, more]
    large = WgmmaTile(as_bytes, planes_w, planes_x, swap, rows_b)
    small = WgmmaTile(as_bytes, planes_w, planes_x, swap, rows_b if fewer == 1 else BLOCK_ROWS, consumers=1)
    half = [WgmmaTile(as_bytes, planes_w, planes_x, swap, rows_b // 2)] if rows_b >= 128 else []
    return [large, *half, small]


def wgmma_unit(tile: WgmmaTile, dtype: int, zero: bool = False) -> CompileUnit:
    """bipolar_gemm_wgmma for a tile and an element type (a code of quantkit.cuda.launch). zero: with zero points."""
    element_bytes = 4 if dtype == _FLOAT32 else 2
    stages, shape = tile.stages(element_bytes), (int(tile.as_bytes), tile.planes_w, tile.planes_x, tile.swap)
    shared_mem = SHARED_ALIGNMENT + stages * tile.stage_bytes + tile.slab_bytes(element_bytes)
    arguments = (*shape, tile.rows_b, tile.consumers, stages, dtype, zero)
    return CompileUnit(_WGMMA, "bipolarGemmWgmma", arguments, shared_mem)


def mma_unit(planes_w: int, planes_x: int, as_bytes: bool, zero: bool = False) -> CompileUnit:
    """bipolar_gemm_mma for a pair of operands, with as many stages of half a k tile as every GPU has room for."""
    stage_bytes = (planes_w + planes_x) * BLOCK_ROWS * LINE_BYTES // 2
    stages = min(_MMA_MAX_STAGES, _MMA_SHARED_BYTES // stage_bytes)
    return CompileUnit(_MMA, "bipolarGemmMma", (int(as_bytes), planes_w, planes_x, stages, zero), stages * stage_bytes)


def gemv_unit(weight_bits: int, groups: int, zero: bool = False, coded: bool = False) -> CompileUnit:
    """bipolar_gemv for one number of weight planes and one of GEMV_GROUPS. zero: with zero points. coded: with scale
    codes."""
    return CompileUnit(_GEMV, "bipolarGemv", (weight_bits, groups, zero, coded))


def quantize_unit(planes: int, dtype: int, zero: bool = False) -> CompileUnit:
    """bipolar_quantize for a number of planes, or 0 for bytes. zero: with zero points."""
    return CompileUnit(_QUANTIZE, "bipolarQuantize", (planes, dtype, zero))


def quantize_rotated_unit(planes: int, dtype: int, zero: bool = False) -> CompileUnit:
    """The same for rotated inputs."""
    return CompileUnit(_QUANTIZE_ROTATED, "bipolarQuantizeRotated", (planes, dtype, zero))


def expand_unit(weight_bits: int, coded: bool = False) -> CompileUnit:
    """bipolar_expand for one number of planes. coded: with scale codes."""
    return CompileUnit(_EXPAND, "bipolarExpand", (weight_bits, coded))


def codings(weight_bits: int) -> tuple[bool, ...]:
    """Whether a weight has scale codes: what kernels of planes are made for."""
    return (False, True) if weight_bits <= MOST_CODED_BITS else (False,)


def binary_pairs() -> list[tuple[int, int]]:
    """(weight_bits, act_bits) whose products run on binary tensor cores where those are native."""
    widths = range(1, MAX_BITS + 1)
    return [(p, q) for p in widths for q in widths if p * q <= BINARY_LIMIT]


def bipolar_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every bipolar instance that can be asked for on a GPU generation."""
    for dtype in range(_DTYPES):
        for planes, zero in product(range(MAX_BITS + 1), (False, True)):
            yield quantize_unit(planes, dtype, zero)
            yield quantize_rotated_unit(planes, dtype, zero)
    for weight_bits in range(1, MAX_BITS + 1):
        yield from (expand_unit(weight_bits, coded) for coded in codings(weight_bits))
        if Kernel.BIPOLAR_GEMV in row.kernels:
            for case in product(GEMV_GROUPS, (False, True), codings(weight_bits)):
                yield gemv_unit(weight_bits, *case)
    binary = [(p, q, False) for p, q in binary_pairs()]
    for kernel, operands in (
        (Kernel.BIPOLAR_BINARY_WGMMA, binary),
        (Kernel.BIPOLAR_INT8_WGMMA, [(1, 1, True)]),
    ):
        if kernel in row.kernels:
            for p, q, as_bytes in operands:
                tiles = wgmma_tiles(p, q, as_bytes)
                yield from (wgmma_unit(*case) for case in product(tiles, range(_DTYPES), (False, True)))
    for kernel, operands in ((Kernel.BIPOLAR_BINARY_MMA, binary), (Kernel.BIPOLAR_INT8_MMA, [(1, 1, True)])):
        if kernel in row.kernels:
            yield from (mma_unit(*case, zero) for case in operands for zero in (False, True))
