"""Which instances of the bcq kernels exist, and how their blocks are laid out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import OVERLAP_CAPABILITY, shared_limit
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.formats.planes import BITS_PER_BYTE, MAX_BITS

SEGMENTS = (256, 128, 64, 32)  # columns that share an activation scale: the largest that divides the group size
_INT8_SEGMENTS = SEGMENTS[1:]  # a sum of 256 codes does not fit into the 23 bits of a float
TILE_ROWS, TILE_COLUMNS = 16, 256
_LANES, _VECTOR_BYTES = 32, 16
_PLANE_BYTES = _LANES * _VECTOR_BYTES  # of one k tile: 16 planes of activations, or one plane of weights
WARP_TILES = 4  # k tiles of x that a warp prepares at once, a word of 32 columns per lane
FLOAT_BYTES = 4
# bcq_int8_gemv has a product per row for so many rows and groups narrower than half a tile; its records, per word of 32
# columns: two bytes an element and 16 more, and 16 zeros for every 64 columns.
_APART_TOKENS, _APART_SEGMENTS = 2, (64, 32)
_APART_RECORD_BYTES = 2 * TILE_COLUMNS + (TILE_COLUMNS // 32 + TILE_COLUMNS // 64) * _VECTOR_BYTES
LUT_BLOCK_TILES = 2  # k tiles whose tables a block of bcq_lut_gemv keeps
LUT_WARPS = 8  # of such a block
LUT_SHARED = LUT_BLOCK_TILES * TILE_COLUMNS // 8 * 256 * FLOAT_BYTES  # a table of 256 sums for every 8 columns
_LUT_ROOMY_BITS = 3  # planes up to which the registers carry three blocks, as in the kernel's launch bounds
_RING_SHARE, _RING_SHARE_TOKENS = 0.69, 0.38  # of a block's shared memory; the rest is for the planes of x
_LEAST_WARPS, _MOST_WARPS = 4, 16
_TURNS = {1: 4, 2: 2}  # planes: tiles per turn; otherwise one
_MOST_DEPTH, _MANY_DEPTH = 4, 3  # slots of a ring; of one beside the records of 8 tokens
_LONG_TURN, _OTHER_WARPS = 4, 12  # tiles; so long turns may come out even on so many warps only
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
# Their layouts by tokens and whether groups are narrow: planes up to, then warps and tiles per slot. What is on its way
# keeps x waiting, so rings are short; sums of more warps would leave too little room beside 8 tokens.
_CLUSTER_LAYOUTS = {
    (4, False): ((1, ((12, 4), (16, 4))), (2, ((12, 4), (16, 2))), (4, ((12, 2),)), (8, ((12, 1),))),
    (4, True): ((1, ((12, 4),)), (2, ((12, 2),)), (7, ((12, 1),)), (8, ((8, 1),))),
    (8, False): ((1, ((8, 4),)), (4, ((8, 2),)), (8, ((8, 1),))),
    (8, True): ((1, ((8, 4),)), (2, ((8, 2),)), (8, ((8, 1),))),
}
_CLUSTER_DEPTH = 2
CLUSTER_BLOCKS = 2  # that share row tiles; multiprocessors come in pairs
_MANY_TOKENS, _FEWER_WARPS = 8, 8  # warps for so many tokens where more could not keep the sums of a block's row tiles
_RESIDENT_WARPS = 8  # where two blocks share a multiprocessor


@dataclass(frozen=True)
class Products:
    """How a kernel multiplies: its source and function, bytes it keeps beside a segment of x, most warps by tokens."""

    source: str
    function: str
    about_bytes: int
    warps: Mapping[int, tuple[tuple[int, int], ...]]


BINARY_PRODUCTS = Products("bcq/binary_gemv.cu", "bcqBinaryGemv", 8, _WARPS)
INT8_PRODUCTS = Products("bcq/int8_gemv.cu", "bcqInt8Gemv", 16, _INT8_WARPS)


@dataclass(frozen=True)
class GemvCase:
    """What an instance of bcq_binary_gemv or, with ``int8``, bcq_int8_gemv computes.

    segment: columns per activation scale. scale_bits: 16 or 8, of a stored scale. tokens: rows of x at once.
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
        """Whether every token has a product of its own, with columns for words of x and not for tokens."""
        return self.int8 and self.tokens <= _APART_TOKENS

    @property
    def record_bytes(self) -> int:
        """What a block keeps of one k tile of x, over all tokens."""
        if self.apart:
            return self.tokens * _APART_RECORD_BYTES
        about = TILE_COLUMNS // self.segment * self.products.about_bytes
        return self.tokens * (_PLANE_BYTES + max(_VECTOR_BYTES, about))

    def tile_bytes(self, entries: int) -> int:
        """Signs and scales of one tile with ``entries`` numbers per group and row."""
        scales = TILE_COLUMNS // self.segment * TILE_ROWS * entries * self.scale_bits // BITS_PER_BYTE
        return self.weight_bits * _PLANE_BYTES + scales


@dataclass(frozen=True)
class GemvTile:
    """How a block of those kernels is laid out.

    warps: per block. steps: tiles per slot of a warp's ring. depth: slots per ring, one of which is being read.
    resident: blocks of successive launches that one multiprocessor holds. cluster: 1 or 2 blocks that share row tiles,
    each with a part of K; None: by the length of the rows.
    """

    warps: int
    steps: int
    depth: int
    resident: int = 1
    cluster: int | None = None


def segment_columns(group_size: int) -> int:
    """Columns per activation scale for a group size (whole row: its width padded to 32).

    Raises KernelError unless group_size is a multiple of 32.
    """
    for columns in SEGMENTS:
        if group_size % columns == 0:
            return columns
    raise KernelError(f"bcq_binary_gemv and bcq_int8_gemv need a group size that is a multiple of 32, not {group_size}")


def gemv_case(weight_bits: int, segment: int, scale_bits: int, tokens: int, *, int8: bool) -> GemvCase:
    """The instance for ``tokens`` rows of x and a segment of the group size.

    Binary: 1 or 2 tokens at once. INT8: 4 or 8, and 1 or 2 where segments are narrow.
    """
    if int8:
        least = 1 if segment in _APART_SEGMENTS else 4
        at_once = next(count for count in (1, 2, 4, 8) if count >= min(max(tokens, least), 8))
        return GemvCase(weight_bits, min(segment, _INT8_SEGMENTS[0]), scale_bits, at_once, int8)
    return GemvCase(weight_bits, segment, scale_bits, min(tokens, 2))


def residencies(case: GemvCase, capability: tuple[int, int]) -> tuple[int, ...]:
    """Blocks per multiprocessor that there are layouts for: also two where launches overlap and registers allow it."""
    small = case.tokens == 1 and case.weight_bits <= _FEW_PLANES
    return (1, 2) if small and capability >= OVERLAP_CAPABILITY else (1,)


def gemv_tile(
    case: GemvCase, capability: tuple[int, int], resident: int = 1, most_warps: int = _MOST_WARPS
) -> GemvTile:
    """The layout for an instance on a compute capability: as many bytes in flight as shared memory allows."""
    warps = next(warps for planes, warps in case.products.warps[case.tokens] if case.weight_bits <= planes)
    warps = _RESIDENT_WARPS if resident > 1 else min(warps, most_warps)
    crowded = case.tokens * case.weight_bits >= _CROWDED or case.weight_bits > _FEW_PLANES
    if crowded and case.segment < _ROOMY_SEGMENT and not case.apart:
        warps = min(warps, 8)
    if case.segment == SEGMENTS[-1] and case.weight_bits >= _FEW_PLANES and not case.apart:
        warps = min(warps, _FINE_WARPS)
    steps = _TURNS.get(case.weight_bits, 1)
    step = case.tile_bytes(case.weight_bits + 1)
    room = int(shared_limit(*capability, resident) * (_RING_SHARE if case.tokens == 1 else _RING_SHARE_TOKENS))
    while steps > 1 and 2 * warps * step * steps > room:
        steps //= 2
    warps = min(warps, max(_LEAST_WARPS, room // (2 * step * steps) // _LEAST_WARPS * _LEAST_WARPS))
    most_depth = _MANY_DEPTH if case.tokens == _MANY_TOKENS else _MOST_DEPTH
    depth = max(2, min(most_depth, room // (warps * step * steps)))
    return GemvTile(warps, steps, depth, resident)


def _deep_tile(case: GemvCase, tile: GemvTile, capability: tuple[int, int]) -> GemvTile:
    """The layout with as many slots as fit: the memory goes on reading while records are made."""
    slot = tile.warps * tile.steps * case.tile_bytes(case.weight_bits + 1)
    return replace(tile, depth=max(tile.depth, int(shared_limit(*capability) * _DEEP_SHARE) // slot))


def _cluster_tiles(case: GemvCase) -> list[GemvTile]:
    """For clusters of two blocks, which prepare half of x each."""
    table = _CLUSTER_LAYOUTS[case.tokens, case.segment < _ROOMY_SEGMENT]
    layouts = next(layouts for planes, layouts in table if case.weight_bits <= planes)
    return [GemvTile(*layout, _CLUSTER_DEPTH, cluster=CLUSTER_BLOCKS) for layout in layouts]


def gemv_tiles(case: GemvCase, capability: tuple[int, int]) -> tuple[GemvTile, ...]:
    """The layouts that there are for an instance, the one that suits any weight first."""
    tiles = [gemv_tile(case, capability, resident) for resident in residencies(case, capability)]
    if case.tokens == _MANY_TOKENS:
        tiles.append(gemv_tile(case, capability, most_warps=_FEWER_WARPS))
    if capability >= OVERLAP_CAPABILITY:
        if case.tokens >= SOME_TOKENS:
            tiles += _cluster_tiles(case)
        if case.tokens == 1 and not case.int8 and case.segment >= _ROOMY_SEGMENT:
            tiles.append(_deep_tile(case, tiles[0], capability))
            if tiles[0].steps >= _LONG_TURN:
                tiles.append(replace(tiles[0], warps=_OTHER_WARPS, depth=_MOST_DEPTH))
    return tuple(dict.fromkeys(tiles))


def gemv_unit(case: GemvCase, tile: GemvTile) -> CompileUnit:
    """The instance for a case and a layout."""
    arguments = (case.weight_bits, case.segment, case.scale_bits, case.tokens)
    layout = (tile.warps, tile.steps, tile.depth, tile.resident)
    return CompileUnit(case.products.source, case.products.function, arguments + layout)


def lut_unit(weight_bits: int, fine: bool, scale_bits: int) -> CompileUnit:
    """bcq_lut_gemv; fine: groups that are not made of whole 32-column words."""
    return CompileUnit("bcq/lut_gemv.cu", "bcqLutGemv", (weight_bits, fine, scale_bits))


SUM_PARTIALS = CompileUnit("bcq/lut_gemv.cu", "bcqSumPartials")


def lut_residency(weight_bits: int, fine: bool, capability: tuple[int, int]) -> int:
    """Blocks of a bcq_lut_gemv instance that one multiprocessor carries, by its registers and shared memory."""
    most = 3 if weight_bits <= _LUT_ROOMY_BITS and not fine else 2
    return next(count for count in range(most, 0, -1) if shared_limit(*capability, count) >= LUT_SHARED)


def dequantize_unit(weight_bits: int, scale_bits: int) -> CompileUnit:
    """bcq_dequantize for one number of planes."""
    return CompileUnit("bcq/dequantize.cu", "bcqDequantize", (weight_bits, scale_bits))


def _gemv_cases(weight_bits: int, scale_bits: int) -> list[GemvCase]:
    cases = [
        gemv_case(weight_bits, segment, scale_bits, tokens, int8=int8)
        for int8 in (False, True)
        for segment in SEGMENTS
        for tokens in (1, 2, 4, 8)
    ]
    return list(dict.fromkeys(cases))


def bcq_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every bcq instance that can be asked for on a GPU of this compute capability."""
    yield SUM_PARTIALS
    for weight_bits in range(1, MAX_BITS + 1):
        for scale_bits in SCALE_BITS:
            yield dequantize_unit(weight_bits, scale_bits)
            for fine in (False, True):
                yield lut_unit(weight_bits, fine, scale_bits)
            for case in _gemv_cases(weight_bits, scale_bits):
                yield from dict.fromkeys(gemv_unit(case, tile) for tile in gemv_tiles(case, (major, minor)))
