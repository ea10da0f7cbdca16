"""Which instances of the bipolar kernels exist, and which tile each pair of widths takes on warpgroup products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.cuda.capability import BINARY_WGMMA, Support, support
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import shared_limit
from quantkit.formats.planes import MAX_BITS

BLOCK_ROWS = 64
LINE_BYTES = 128
BITS_PER_LINE = 8 * LINE_BYTES
BINARY_LIMIT = 8
"""Plane products at which INT8 draws level: a binary product runs at 8 times the INT8 rate."""

GEMV_GROUPS = (1, 2, 4)
DTYPES = 3
_SHARED_BYTES = shared_limit(9, 0)
_SHARED_ALIGNMENT = 1024
_LINE_STRUCT_BYTES = 16
_LINE_SETS, _CORNER_BYTES = 2, 8
_BARRIER_BYTES = 16  # one that fills and one that empties
_MAX_STAGES = 8
_SLAB_TOKENS, _SLAB_PADDING = 32, 16
_STEPS = 4  # products per line: 256 bits or 32 bytes each
_L2_BYTES_PER_CLOCK = 24  # per SM where all copy, as tiles of one plane each were seen to reach on an H200
_SM_BYTES_PER_CLOCK = 64  # what one SM can take
_MMA_SHARED_BYTES = shared_limit(8, 6)  # the smallest
_MMA_MAX_STAGES = 4
# Rows of operand B in a tile where A has one plane: its planes times these are the columns of one product, <= 256.
_FUSED_COLUMNS = {1: 256, 2: 128, 3: 64, 4: 64, 5: 32, 6: 32, 7: 32, 8: 32}
# Pairs with x as operand A though W has fewer planes: the way to y without a detour outweighs the narrower product.
_UNSWAPPED = ((1, 2),)
# (fewer planes, more planes) where both have several: accumulators for every level must fit the registers.
_LEVEL_COLUMNS = {(2, 2): 128, (2, 3): 64, (2, 4): 64}


@dataclass(frozen=True)
class WgmmaTile:
    """Shape of one instance of bipolar_gemm_wgmma.

    planes_w, planes_x: planes per operand (1 and 1 for bytes). swap: operand A is W. columns: rows of B in a tile.
    consumers: warpgroups of 64 rows of A.
    """

    as_bytes: bool
    planes_w: int
    planes_x: int
    swap: bool
    columns: int
    consumers: int = 2

    @property
    def rows(self) -> int:
        """Rows of A in a tile."""
        return self.consumers * BLOCK_ROWS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one k tile of both operands."""
        planes_a, planes_b = (self.planes_w, self.planes_x) if self.swap else (self.planes_x, self.planes_w)
        return (planes_a * self.rows + planes_b * self.columns) * LINE_BYTES

    def stage_clocks(self, busy: float) -> float:
        """Clocks of one k tile: of its products, or of its copies from L2 where those take longer.

        busy: share of the SMs that copy at the same time.
        """
        planes_a, planes_b = (self.planes_w, self.planes_x) if self.swap else (self.planes_x, self.planes_w)
        products = _STEPS * self.rows // BLOCK_ROWS * planes_a * planes_b * self.columns / 2
        copied = (planes_a * self.rows + planes_b * self.columns) * LINE_BYTES
        return max(products, copied / min(_SM_BYTES_PER_CLOCK, _L2_BYTES_PER_CLOCK / busy))

    def slab_bytes(self, element_bytes: int) -> int:
        """Shared memory through which results pass where operand A is W."""
        return self.consumers * _SLAB_TOKENS * (BLOCK_ROWS * element_bytes + _SLAB_PADDING) if self.swap else 0

    def stages(self, element_bytes: int) -> int:
        """Stages that fit beside slabs and the kernel's static shared memory."""
        lines = (self.rows + self.columns) * _LINE_STRUCT_BYTES + _CORNER_BYTES + _BARRIER_BYTES
        static = _LINE_SETS * lines + _MAX_STAGES * _BARRIER_BYTES
        room = _SHARED_BYTES - _SHARED_ALIGNMENT - static - self.slab_bytes(element_bytes)
        return min(_MAX_STAGES, room // self.stage_bytes)

    def shared_bytes(self, element_bytes: int) -> int:
        """Dynamic shared memory of a block."""
        return _SHARED_ALIGNMENT + self.stages(element_bytes) * self.stage_bytes + self.slab_bytes(element_bytes)


def wgmma_tiles(planes_w: int, planes_x: int, as_bytes: bool) -> list[WgmmaTile]:
    """The tiles that exist for a pair of operands, the one for large problems first."""
    fewer, more = sorted((planes_w, planes_x))
    swap = planes_w < planes_x and (planes_w, planes_x) not in _UNSWAPPED
    columns = _FUSED_COLUMNS[more] if fewer == 1 else _LEVEL_COLUMNS[fewer, more]
    large = WgmmaTile(as_bytes, planes_w, planes_x, swap, columns)
    small = WgmmaTile(as_bytes, planes_w, planes_x, swap, columns if fewer == 1 else BLOCK_ROWS, consumers=1)
    half = [WgmmaTile(as_bytes, planes_w, planes_x, swap, columns // 2)] if columns >= 128 else []
    return [large, *half, small]


def wgmma_unit(tile: WgmmaTile, dtype: int) -> CompileUnit:
    """bipolar_gemm_wgmma for a tile and an element type (a code of quantkit.cuda.launch)."""
    arguments = (int(tile.as_bytes), tile.planes_w, tile.planes_x, tile.swap, tile.columns)
    stages = tile.stages(4 if dtype == 2 else 2)
    return CompileUnit(
        "bipolar/gemm_wgmma.cu",
        "bipolarGemmWgmma",
        (*arguments, tile.consumers, stages, dtype),
        hopper=True,
    )


def mma_stages(planes_w: int, planes_x: int) -> int:
    """Stages of bipolar_gemm_mma that fit every GPU from compute capability 8.0 on."""
    return min(_MMA_MAX_STAGES, _MMA_SHARED_BYTES // mma_stage_bytes(planes_w, planes_x))


def mma_stage_bytes(planes_w: int, planes_x: int) -> int:
    """Shared memory of half a k tile of both operands."""
    return (planes_w + planes_x) * BLOCK_ROWS * LINE_BYTES // 2


def mma_unit(planes_w: int, planes_x: int, as_bytes: bool) -> CompileUnit:
    """bipolar_gemm_mma for a pair of operands."""
    arguments = (int(as_bytes), planes_w, planes_x, mma_stages(planes_w, planes_x))
    return CompileUnit("bipolar/gemm_mma.cu", "bipolarGemmMma", arguments)


def gemv_unit(weight_bits: int, groups: int) -> CompileUnit:
    """bipolar_gemv for one number of weight planes and of 8-column groups."""
    return CompileUnit("bipolar/gemv.cu", "bipolarGemv", (weight_bits, groups))


def quantize_unit(planes: int, dtype: int) -> CompileUnit:
    """bipolar_quantize for a number of planes, or 0 for bytes."""
    return CompileUnit("bipolar/quantize.cu", "bipolarQuantize", (planes, dtype))


def expand_unit(weight_bits: int) -> CompileUnit:
    """bipolar_expand for one number of planes."""
    return CompileUnit("bipolar/expand.cu", "bipolarExpand", (weight_bits,))


def binary_pairs() -> list[tuple[int, int]]:
    """(weight_bits, act_bits) whose products run on binary tensor cores."""
    widths = range(1, MAX_BITS + 1)
    return [(p, q) for p in widths for q in widths if p * q <= BINARY_LIMIT]


def bipolar_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every bipolar instance that can be asked for on a GPU of this compute capability."""
    for dtype in range(DTYPES):
        yield from (quantize_unit(planes, dtype) for planes in range(MAX_BITS + 1))
    for weight_bits in range(1, MAX_BITS + 1):
        yield expand_unit(weight_bits)
        yield from (gemv_unit(weight_bits, groups) for groups in GEMV_GROUPS)
    operands = [(p, q, False) for p, q in binary_pairs()] + [(1, 1, True)]
    if support(BINARY_WGMMA, major, minor) is Support.NATIVE:
        for p, q, as_bytes in operands:
            yield from (wgmma_unit(tile, dtype) for tile in wgmma_tiles(p, q, as_bytes) for dtype in range(DTYPES))
    for p, q, as_bytes in operands:
        yield mma_unit(p, q, as_bytes)
