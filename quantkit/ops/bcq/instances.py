"""Which instances of the bcq kernels exist, and how their blocks are laid out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quantkit.cuda.architectures import WARP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.source import KernelSource
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.formats.planes import BITS_PER_BYTE, MAX_BITS
from quantkit.ops.bcq.order import GRID_PLANES, Order
from quantkit.ops.constants import SHARED_CONSTANTS

SEGMENTS = (256, 128, 64, 32)  # elements of x that share an activation scale: the largest that divides the group size
_INT8_SEGMENTS = SEGMENTS[1:]  # a sum of 256 codes does not fit into the 23 bits of a float
TILE_N, TILE_K = 16, 256
_VECTOR_BYTES = 16
_PLANE_BYTES = WARP_THREADS * _VECTOR_BYTES  # of one k tile: 16 planes of activations, or one plane of weights
WARP_TILES = 4  # k tiles of x that a warp prepares at once, a word of 32 elements per lane
FLOAT_BYTES = 4
# bcq_int8_gemv has a product per token for so many tokens and groups narrower than half a tile; its records, per word
# of 32 elements: two bytes an element and 16 more, and 16 zeros for every 64.
_APART_TOKENS, _APART_SEGMENTS = 2, (64, 32)
_APART_RECORD_BYTES = 2 * TILE_K + (TILE_K // 32 + TILE_K // 64) * _VECTOR_BYTES
LUT_BLOCK_TILES = 2  # k tiles whose tables a block of bcq_lut_gemv keeps
LUT_THREADS, DEQUANTIZE_THREADS = 256, 256  # of a block
LUT_WARPS = LUT_THREADS // WARP_THREADS
LUT_SHARED = LUT_BLOCK_TILES * TILE_K // 8 * 256 * FLOAT_BYTES  # a table of 256 sums for every 8 elements
_LUT_ROOMY_BITS = 3  # planes up to which the registers carry three blocks
# bcq_gemm: columns of a panel of x; tokens and threads of a block that puts x in order; stages of x
# at most, and what their barriers take.
PANEL_K, ARRANGE_TOKENS, ARRANGE_THREADS = 64, 16, 256
GEMM_MOST_STAGES, GEMM_BARRIER_BYTES, GEMM_FEW_TOKENS, GEMM_NUMBER_TOKENS = 16, 1 << 10, 64, 32
# bcq_experts_gemm: tokens whose sums leave a block at once, floats between theirs; threads of the block that sorts
# tokens.
EXPERTS_CHUNK_TOKENS, EXPERTS_SUM_PADDING, ROUTE_THREADS = 32, 4, 512
PROCESSOR_REGISTERS = 1 << 16
MAILBOX_BYTES = 128  # of every block where there are clusters
_RING_SHARE, _RING_SHARE_TOKENS = 0.69, 0.38  # of a block's shared memory; the rest is for the planes of x
_LEAST_WARPS, _MOST_WARPS = 4, 16
_STEP_TILES = {1: 4, 2: 2}  # planes: tiles per step; otherwise one
_MOST_STAGES, _MANY_STAGES = 4, 3  # of a ring; of one beside the records of 8 tokens
_LONG_STEP, _OTHER_WARPS = 4, 12  # tiles; such steps may come out even on so many warps only
_DEEP_SHARE = 0.87  # of a block's shared memory, for a ring as deep as may be
_CROWDED, _FEW_PLANES, _ROOMY_SEGMENT = 8, 4, 128  # where registers run short: tokens times planes, planes, segment
_FINE_WARPS = 12  # at most, for groups of 32 from 4 planes on: 16 warps of 128 registers would spill
# Warps per block, by tokens: (planes up to, warps). As many as the registers of one multiprocessor carry.
_WARPS = {
    1: ((4, 16), (8, 12)),
    2: ((4, 12), (8, 8)),
}
_INT8_WARPS = {
    1: ((4, 16), (8, 12)),
    2: ((8, 12),),
    4: ((8, 12),),
    8: ((4, 12), (8, 8)),
}
SOME_TOKENS = 4  # at least, whose records two blocks share
# Their layouts by tokens and whether groups are narrow: planes up to, then warps and tiles per step. What is on its way
# keeps x waiting, so rings are short; sums of more warps would leave too little room beside 8 tokens.
_CLUSTER_LAYOUTS = {
    (4, False): ((1, ((12, 4), (16, 4))), (2, ((12, 4), (16, 2))), (4, ((12, 2),)), (8, ((12, 1),))),
    (4, True): ((1, ((12, 4),)), (2, ((12, 2),)), (7, ((12, 1),)), (8, ((8, 1),))),
    (8, False): ((1, ((8, 4),)), (4, ((8, 2),)), (8, ((8, 1),))),
    (8, True): ((1, ((8, 4),)), (2, ((8, 2),)), (8, ((8, 1),))),
}
_CLUSTER_STAGES = 2
CLUSTER_BLOCKS = 2  # that share n tiles; multiprocessors come in pairs
_MANY_TOKENS, _FEWER_WARPS = 8, 8  # warps for so many tokens where more could not keep the sums of a block's n tiles
_RESIDENT_WARPS = 8  # where two blocks share a multiprocessor


@dataclass(frozen=True)
class Products:
    """How a kernel multiplies: its source and function, bytes it keeps beside a segment of x, most warps by tokens."""

    source: KernelSource
    function: str
    about_bytes: int
    warps: Mapping[int, tuple[tuple[int, int], ...]]


CONSTANTS = {
    **SHARED_CONSTANTS,
    "TILE_N": TILE_N,
    "TILE_K": TILE_K,
    "MAILBOX_BYTES": MAILBOX_BYTES,
    "LUT_BLOCK_TILES": LUT_BLOCK_TILES,
    "LUT_THREADS": LUT_THREADS,
    "LUT_ROOMY_BITS": _LUT_ROOMY_BITS,
    "DEQUANTIZE_THREADS": DEQUANTIZE_THREADS,
    "PANEL_K": PANEL_K,
    "ARRANGE_TOKENS": ARRANGE_TOKENS,
    "ARRANGE_THREADS": ARRANGE_THREADS,
    "GEMM_MOST_STAGES": GEMM_MOST_STAGES,
    "GEMM_FEW_TOKENS": GEMM_FEW_TOKENS,
    "GEMM_NUMBER_TOKENS": GEMM_NUMBER_TOKENS,
    "GEMM_BARRIER_BYTES": GEMM_BARRIER_BYTES,
    "EXPERTS_CHUNK_TOKENS": EXPERTS_CHUNK_TOKENS,
    "EXPERTS_SUM_PADDING": EXPERTS_SUM_PADDING,
    "ROUTE_THREADS": ROUTE_THREADS,
    "PROCESSOR_REGISTERS": PROCESSOR_REGISTERS,
}
_GEMM = KernelSource("bcq/gemm.cu", CONSTANTS)
ARRANGE_SOURCE = KernelSource("bcq/arrange.cu", CONSTANTS)
"""Puts x in the order of _GEMM's products."""
SOURCES = {
    Kernel.BCQ_BINARY_GEMV: KernelSource("bcq/binary_gemv.cu", CONSTANTS),
    Kernel.BCQ_INT8_GEMV: KernelSource("bcq/int8_gemv.cu", CONSTANTS),
    Kernel.BCQ_LEVEL_GEMV: KernelSource("bcq/level_gemv.cu", CONSTANTS),
    Kernel.BCQ_LUT_GEMV: KernelSource("bcq/lut_gemv.cu", CONSTANTS),
    Kernel.BCQ_GEMM_MMA: _GEMM,
    Kernel.BCQ_GEMM_WGMMA: _GEMM,
    Kernel.BCQ_DEQUANTIZE: KernelSource("bcq/dequantize.cu", CONSTANTS),
}
"""The bcq kernels by id."""

BINARY_PRODUCTS = Products(SOURCES[Kernel.BCQ_BINARY_GEMV], "bcqBinaryGemv", 8, _WARPS)
INT8_PRODUCTS = Products(SOURCES[Kernel.BCQ_INT8_GEMV], "bcqInt8Gemv", 16, _INT8_WARPS)


@dataclass(frozen=True)
class GemvCase:
    """What an instance of bcq_binary_gemv or, with ``int8``, bcq_int8_gemv computes.

    segment: elements of x per activation scale. scale_bits: 16 or 8, of a stored scale. tokens: of x at once.
    """

    weight_bits: int
    segment: int
    scale_bits: int
    tokens: int
    int8: bool = False

    @property
    def products(self) -> Products:
        """How it multiplies."""
        return INT8_PRODUCTS if self.int8 else BINARY_PRODUCTS

    @property
    def apart(self) -> bool:
        """Whether every token has a product of its own, whose columns are words of x and not tokens."""
        return self.int8 and self.tokens <= _APART_TOKENS

    @property
    def record_bytes(self) -> int:
        """What a block keeps of one k tile of x, over all tokens."""
        if self.apart:
            return self.tokens * _APART_RECORD_BYTES
        about = TILE_K // self.segment * self.products.about_bytes
        return self.tokens * (_PLANE_BYTES + max(_VECTOR_BYTES, about))

    def tile_bytes(self, entries: int) -> int:
        """Signs and scales of one tile with ``entries`` numbers per group and row."""
        scales = TILE_K // self.segment * TILE_N * entries * self.scale_bits // BITS_PER_BYTE
        return self.weight_bits * _PLANE_BYTES + scales


@dataclass(frozen=True)
class GemvTile:
    """How a block of those kernels is laid out.

    warps: per block. step_tiles: k tiles that a warp takes at once, in one stage. stages: of a warp's ring, one of
    which is being read. resident: blocks of successive launches that one multiprocessor holds. cluster: 1 or 2 blocks
    that share n tiles, each with a part of K; None: by the length of K.
    """

    warps: int
    step_tiles: int
    stages: int
    resident: int = 1
    cluster: int | None = None


def segment_width(group_size: int) -> int:
    """Elements of x per activation scale for a group size (whole row: its width padded to 32).

    Raises KernelError unless group_size is a multiple of 32.
    """
    for width in SEGMENTS:
        if group_size % width == 0:
            return width
    raise KernelError(f"bcq_binary_gemv and bcq_int8_gemv need a group size that is a multiple of 32, not {group_size}")


def gemv_case(weight_bits: int, segment: int, scale_bits: int, tokens: int, *, int8: bool) -> GemvCase:
    """The instance for a number of tokens and a segment of the group size.

    Binary: 1 or 2 tokens at once. INT8: 4 or 8, and 1 or 2 where segments are narrow.
    """
    if int8:
        least = 1 if segment in _APART_SEGMENTS else 4
        at_once = next(count for count in (1, 2, 4, 8) if count >= min(max(tokens, least), 8))
        return GemvCase(weight_bits, min(segment, _INT8_SEGMENTS[0]), scale_bits, at_once, int8)
    return GemvCase(weight_bits, segment, scale_bits, min(tokens, 2))


def residencies(case: GemvCase, row: Architecture) -> tuple[int, ...]:
    """Blocks per multiprocessor that there are layouts for: two too where launches overlap and registers allow it."""
    small = case.tokens == 1 and case.weight_bits <= _FEW_PLANES
    return (1, 2) if small and row.overlap else (1,)


def gemv_tile(case: GemvCase, row: Architecture, resident: int = 1, most_warps: int = _MOST_WARPS) -> GemvTile:
    """The layout for an instance on a GPU generation: as many bytes in flight as shared memory allows."""
    warps = next(warps for planes, warps in case.products.warps[case.tokens] if case.weight_bits <= planes)
    warps = _RESIDENT_WARPS if resident > 1 else min(warps, most_warps)
    crowded = case.tokens * case.weight_bits >= _CROWDED or case.weight_bits > _FEW_PLANES
    if crowded and case.segment < _ROOMY_SEGMENT and not case.apart:
        warps = min(warps, 8)
    if case.segment == SEGMENTS[-1] and case.weight_bits >= _FEW_PLANES and not case.apart:
        warps = min(warps, _FINE_WARPS)
    step_tiles = _STEP_TILES.get(case.weight_bits, 1)
    tile_bytes = case.tile_bytes(case.weight_bits + 1)
    room = int(row.shared_limit(resident) * (_RING_SHARE if case.tokens == 1 else _RING_SHARE_TOKENS))
    while step_tiles > 1 and 2 * warps * tile_bytes * step_tiles > room:
        step_tiles //= 2
    warps = min(warps, max(_LEAST_WARPS, room // (2 * tile_bytes * step_tiles) // _LEAST_WARPS * _LEAST_WARPS))
    most_stages = _MANY_STAGES if case.tokens == _MANY_TOKENS else _MOST_STAGES
    stages = max(2, min(most_stages, room // (warps * tile_bytes * step_tiles)))
    return GemvTile(warps, step_tiles, stages, resident)


def _deep_tile(case: GemvCase, tile: GemvTile, row: Architecture) -> GemvTile:
    """The layout with as many stages as fit: the memory goes on reading while records are made."""
    stage = tile.warps * tile.step_tiles * case.tile_bytes(case.weight_bits + 1)
    return replace(tile, stages=max(tile.stages, int(row.shared_limit() * _DEEP_SHARE) // stage))


def _cluster_tiles(case: GemvCase) -> list[GemvTile]:
    """For clusters of two blocks, which prepare half of x each."""
    table = _CLUSTER_LAYOUTS[case.tokens, case.segment < _ROOMY_SEGMENT]
    layouts = next(layouts for planes, layouts in table if case.weight_bits <= planes)
    return [GemvTile(*layout, _CLUSTER_STAGES, cluster=CLUSTER_BLOCKS) for layout in layouts]


def gemv_tiles(case: GemvCase, row: Architecture) -> tuple[GemvTile, ...]:
    """The layouts that there are for an instance, the one that suits any weight first."""
    tiles = [gemv_tile(case, row, resident) for resident in residencies(case, row)]
    if case.tokens == _MANY_TOKENS:
        tiles.append(gemv_tile(case, row, most_warps=_FEWER_WARPS))
    if row.overlap:
        if row.clusters and case.tokens >= SOME_TOKENS:
            tiles += _cluster_tiles(case)
        if case.tokens == 1 and not case.int8 and case.segment >= _ROOMY_SEGMENT:
            tiles.append(_deep_tile(case, tiles[0], row))
            if tiles[0].step_tiles >= _LONG_STEP:
                tiles.append(replace(tiles[0], warps=_OTHER_WARPS, stages=_MOST_STAGES))
    return tuple(dict.fromkeys(tiles))


def gemv_unit(case: GemvCase, tile: GemvTile) -> CompileUnit:
    """The instance for a case and a layout."""
    arguments = (case.weight_bits, case.segment, case.scale_bits, case.tokens)
    layout = (tile.warps, tile.step_tiles, tile.stages, tile.resident)
    return CompileUnit(case.products.source, case.products.function, arguments + layout)


def lut_unit(weight_bits: int, fine: bool, scale_bits: int) -> CompileUnit:
    """bcq_lut_gemv; fine: groups that are not made of whole words of 32 elements."""
    return CompileUnit(SOURCES[Kernel.BCQ_LUT_GEMV], "bcqLutGemv", (weight_bits, fine, scale_bits))


SUM_PARTIALS = CompileUnit(SOURCES[Kernel.BCQ_LUT_GEMV], "bcqSumPartials")


def lut_residency(weight_bits: int, fine: bool, row: Architecture) -> int:
    """Blocks of a bcq_lut_gemv instance that one multiprocessor carries, by its registers and shared memory."""
    most = 3 if weight_bits <= _LUT_ROOMY_BITS and not fine else 2
    return next(count for count in range(most, 0, -1) if row.shared_limit(count) >= LUT_SHARED)


def dequantize_unit(weight_bits: int, scale_bits: int, order: Order) -> CompileUnit:
    """bcq_dequantize for one number of planes in an order."""
    return CompileUnit(SOURCES[Kernel.BCQ_DEQUANTIZE], "bcqDequantize", (weight_bits, scale_bits, order.number))


def _gemv_cases(weight_bits: int, scale_bits: int, row: Architecture) -> list[GemvCase]:
    cases = [
        gemv_case(weight_bits, segment, scale_bits, tokens, int8=int8)
        for int8, kernel in ((False, Kernel.BCQ_BINARY_GEMV), (True, Kernel.BCQ_INT8_GEMV))
        if kernel in row.kernels
        for segment in SEGMENTS
        for tokens in (1, 2, 4, 8)
    ]
    return list(dict.fromkeys(cases))


def bcq_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every bcq instance that can be asked for on a GPU generation."""
    yield SUM_PARTIALS
    for weight_bits in range(1, MAX_BITS + 1):
        for scale_bits in SCALE_BITS:
            yield from (
                dequantize_unit(weight_bits, scale_bits, order)
                for order in Order
                if order != Order.GRID or (weight_bits in GRID_PLANES and scale_bits == SCALE_BITS[0])
            )
            for fine in (False, True):
                yield lut_unit(weight_bits, fine, scale_bits)
            for case in _gemv_cases(weight_bits, scale_bits, row):
                yield from dict.fromkeys(gemv_unit(case, tile) for tile in gemv_tiles(case, row))
