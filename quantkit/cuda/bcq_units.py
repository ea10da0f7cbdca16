"""Which instances of the bcq kernels exist, their tile sizes and their shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

from quantkit.cuda.units import CompileUnit
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.formats.planes import MAX_BITS

SEGMENTS = (256, 128, 64, 32)  # columns that share an activation scale: the largest that divides the group size
TILE_ROWS, TILE_COLUMNS = 16, 256
_LANES, _VECTOR_BYTES = 32, 16
_PLANE_BYTES = _LANES * _VECTOR_BYTES  # of one k tile: 16 planes of activations, or one plane of weights
_META_BYTES, _FLOAT_BYTES = 4 * 8, 4  # per segment and k tile: four lanes' scale and plane sum
_LUT_TILE_BYTES = TILE_COLUMNS // 8 * (256 + 2 * 16) * _FLOAT_BYTES  # 32 tables and their half sums
_RING_SHARE, _RING_SHARE_TOKENS = 0.68, 0.28  # of a block's shared memory; the rest is for the planes of x
_LEAST_WARPS = 4
_CROWDED, _LEANEST_SEGMENT = 8, 128  # tokens times planes from which only one segment width fits the registers
_TURNS = {1: (4, 2)}  # planes: (tiles per turn, slots); otherwise a tile and four slots
_SUMS_SHARE = 0.2  # of a block's shared memory, for the warps' sums; more row tiles go to more blocks
# Warps per block, by tokens: (planes up to, warps). As many as the registers of one multiprocessor carry.
_WARPS = {
    1: ((4, 16), (8, 12)),
    2: ((4, 12), (8, 8)),
    4: ((4, 12), (8, 8)),
}

_SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}
_SHARED_BYTES_ELSEWHERE = 99 << 10


@dataclass(frozen=True)
class Gpu:
    """What the layout depends on: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    processors: int


@dataclass(frozen=True)
class BinaryTile:
    """How a block of bcq_binary_gemv is laid out.

    warps: per block. steps: tiles per slot of a warp's ring. depth: slots per ring, one of which is being read.
    """

    warps: int
    steps: int
    depth: int


@dataclass(frozen=True)
class BinaryPlan:
    """One launch of bcq_binary_gemv: the instance, blocks per group of tokens, passes over K, shared memory."""

    unit: CompileUnit
    blocks: int
    pass_tiles: int
    shared_mem: int
    warps: int


def shared_limit(major: int, minor: int) -> int:
    """Bytes of shared memory that one block may use."""
    return _SHARED_BYTES.get((major, minor), _SHARED_BYTES_ELSEWHERE)


def segment_columns(group_size: int) -> int:
    """Columns per activation scale for a group size (whole row: its width padded to 32).

    Raises KernelError unless group_size is a multiple of 32.
    """
    for columns in SEGMENTS:
        if group_size % columns == 0:
            return columns
    raise KernelError(f"bcq_binary_gemv needs a group size that is a multiple of 32, not {group_size}")


def tokens_at_once(tokens: int, weight_bits: int) -> int:
    """Tokens per block: 1, 2 or 4; at most 2 from 7 planes on, where 4 do not fit into the registers."""
    most = 4 if weight_bits <= 6 else 2
    return next(count for count in (1, 2, 4) if count >= min(tokens, most))


def _step_bytes(weight_bits: int, segment: int) -> int:
    """Signs and scales of one tile, counting an offset."""
    return weight_bits * _PLANE_BYTES + TILE_COLUMNS // segment * TILE_ROWS * (weight_bits + 1) * 2


def binary_tile(weight_bits: int, segment: int, tokens: int, capability: tuple[int, int]) -> BinaryTile:
    """The layout for an instance on a compute capability: as many bytes in flight as shared memory allows."""
    warps = next(warps for planes, warps in _WARPS[tokens] if weight_bits <= planes)
    if tokens * weight_bits > _CROWDED and segment != _LEANEST_SEGMENT:
        warps = min(warps, 8)
    steps, depth = _TURNS.get(weight_bits, (1, 4))
    step = _step_bytes(weight_bits, segment)
    room = int(shared_limit(*capability) * (_RING_SHARE if tokens == 1 else _RING_SHARE_TOKENS))
    while steps > 1 and 2 * warps * step * steps > room:
        steps //= 2
    warps = min(warps, max(_LEAST_WARPS, room // (2 * step * steps) // _LEAST_WARPS * _LEAST_WARPS))
    depth = max(2, min(depth, room // (warps * step * steps)))
    return BinaryTile(warps, steps, depth)


def binary_unit(weight_bits: int, segment: int, tokens: int, tile: BinaryTile) -> CompileUnit:
    """bcq_binary_gemv for a number of planes, a segment width, tokens at once and a layout."""
    arguments = (weight_bits, segment, tokens, tile.warps, tile.steps, tile.depth)
    return CompileUnit("bcq_binary_gemv.cu", "bcqBinaryGemv", arguments)


@cache
def plan_binary(
    *,
    weight_bits: int,
    segment: int,
    entries: int,
    tokens: int,
    tile_counts: tuple[int, int],
    gpu: Gpu,
    tile: BinaryTile | None = None,
) -> BinaryPlan:
    """The instance, blocks, passes and shared memory of one launch.

    entries: scale entries per group. tokens: at once. tile_counts: (row tiles, k tiles) of the weight.
    Raises KernelError where not even one k tile's planes fit beside the rings.
    """
    tile = tile or binary_tile(weight_bits, segment, tokens, gpu.capability)
    row_tiles, k_tiles = tile_counts
    step = weight_bits * _PLANE_BYTES + TILE_COLUMNS // segment * TILE_ROWS * entries * 2
    ring = tile.warps * tile.steps * tile.depth * step
    sums_per_tile = TILE_ROWS * tokens * _FLOAT_BYTES * tile.warps
    most_tiles = max(1, int(shared_limit(*gpu.capability) * _SUMS_SHARE) // sums_per_tile)
    blocks = max(min(row_tiles, gpu.processors), ceil(row_tiles / most_tiles))
    sums = sums_per_tile * ceil(row_tiles / blocks)
    per_tile = tokens * (_PLANE_BYTES + TILE_COLUMNS // segment * _META_BYTES)
    fitting = (shared_limit(*gpu.capability) - ring - sums) // per_tile
    if fitting < 1:
        raise KernelError(f"bcq_binary_gemv: a layout of {tile} does not fit into shared memory")
    pass_tiles = ceil(k_tiles / ceil(k_tiles / fitting))
    unit = binary_unit(weight_bits, segment, tokens, tile)
    return BinaryPlan(unit, blocks, pass_tiles, ring + sums + per_tile * pass_tiles, tile.warps)


def lut_unit(weight_bits: int, fine: bool, scale_bits: int) -> CompileUnit:
    """bcq_lut_gemv; fine: groups that are not made of whole 32-column words."""
    return CompileUnit("bcq_lut_gemv.cu", "bcqLutGemv", (weight_bits, fine, scale_bits))


SUM_PARTIALS = CompileUnit("bcq_lut_gemv.cu", "bcqSumPartials")


def lut_tiles_per_block(capability: tuple[int, int]) -> int:
    """k tiles whose tables one block keeps: two where three such blocks fit on a multiprocessor."""
    return 2 if shared_limit(*capability) >= 3 * _LUT_TILE_BYTES * 2 else 1


def lut_shared(tiles: int) -> int:
    """Bytes of shared memory for the tables of some k tiles."""
    return tiles * _LUT_TILE_BYTES


def dequantize_unit(weight_bits: int, scale_bits: int) -> CompileUnit:
    """bcq_dequantize for one number of planes."""
    return CompileUnit("bcq_dequantize.cu", "bcqDequantize", (weight_bits, scale_bits))


def bcq_units(major: int, minor: int) -> Iterator[CompileUnit]:
    """Every bcq instance that can be asked for on a GPU of this compute capability."""
    yield SUM_PARTIALS
    for weight_bits in range(1, MAX_BITS + 1):
        for scale_bits in SCALE_BITS:
            yield dequantize_unit(weight_bits, scale_bits)
            for fine in (False, True):
                yield lut_unit(weight_bits, fine, scale_bits)
        for segment in SEGMENTS:
            for tokens in sorted({tokens_at_once(count, weight_bits) for count in (1, 2, 4)}):
                yield binary_unit(
                    weight_bits, segment, tokens, binary_tile(weight_bits, segment, tokens, (major, minor))
                )
