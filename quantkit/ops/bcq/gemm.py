"""The fused product of many tokens: its instances, and which of them suits a weight.

kernels/bcq/gemm.cuh draws it. Planes become 16-bit floats in registers and meet x on tensor cores, so a weight is read
once, in its own bits, for every tile of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import Gpu
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.cuda.parameters import Argument
from quantkit.errors import KernelError
from quantkit.formats.planes import BITS_PER_BYTE
from quantkit.ops.bcq.gemm_cost import cycles
from quantkit.ops.bcq.instances import (
    ARRANGE_SOURCE,
    ARRANGE_THREADS,
    ARRANGE_TOKENS,
    FLOAT_BYTES,
    GEMM_BARRIER_BYTES,
    GEMM_FEW_TOKENS,
    GEMM_MOST_STAGES,
    PANEL_K,
    SOURCES,
    TILE_K,
    TILE_N,
    GemvCase,
)
from quantkit.ops.bcq.order import Order, offsets_apart, orders_of
from quantkit.ops.items import SHARED_ITEMS, shares

FUSED = (Kernel.BCQ_GEMM_WGMMA, Kernel.BCQ_GEMM_MMA)
"""The fused products; a generation has one of them."""
GEMM_TYPES = (torch.float16, torch.bfloat16)
GROUP_WARPS = 4
_SHORT_BYTES, _VECTOR_BYTES = 2, 16
VECTOR_VALUES = _VECTOR_BYTES // _SHORT_BYTES
"""Elements of x in 16 bytes."""
_PANEL_ROW_BYTES = PANEL_K * _SHORT_BYTES
_HALF_TILES = 2  # of a k tile: segments of as many or fewer do not change within them
_FEW_BITS = 4  # planes up to which shared memory carries the other shapes at any group size
# (tokens, row groups, phases, slots) of an instance's tile, block and rings.
_WARPGROUP_SHAPES = (
    *((16, 2, 2, 3), (16, 1, 4, 3), (32, 3, 1, 3), (32, 2, 2, 2), (32, 1, 3, 3)),
    *((64, 4, 1, 2), (64, 3, 1, 3), (64, 2, 2, 2), (64, 1, 3, 3), (128, 3, 1, 3), (128, 2, 1, 4), (256, 2, 1, 3)),
)
# Of these, what registers do not carry without spilling, by planes and whether offsets are added apart.
_SPILLING_OF_8 = {
    *((16, 2, 2, 3), (16, 1, 4, 3), (32, 2, 2, 2)),
    *((64, 4, 1, 2), (64, 3, 1, 3), (64, 2, 2, 2)),
}
_SPILLING: dict[tuple[int, bool], set[tuple[int, int, int, int]]] = {
    (1, False): {(128, 3, 1, 3)},
    (3, False): {(64, 4, 1, 2)},
    (4, True): {(64, 4, 1, 2), (64, 2, 2, 2)},
    (5, False): {(64, 1, 3, 3)},
    (6, False): {(32, 2, 2, 2)},
    (7, False): {(32, 2, 2, 2), (64, 3, 1, 3)},
    (8, False): _SPILLING_OF_8,
    (8, True): _SPILLING_OF_8,
}
_NARROW_SHAPES = ((16, 1, 1, 2), (64, 2, 1, 2))  # of warpgroups, for many planes in narrow groups
_PAIRED_SHAPES = ((256, 2, 1, 3),)  # whose blocks copy x for each other where boxes do; smaller tiles gain nothing
WARP_SHAPES = ((16, 2, 1, 3), (16, 1, 2, 3), (16, 1, 1, 2), (64, 1, 1, 3))


@dataclass(frozen=True)
class GemmShape:
    """An instance without its types.

    tokens: of a tile. row_groups: groups of four consumer warps of a block, each with rows of its own. phases: as many
    times these groups, which take the k tiles of the same rows in turn. slots: of a warp's ring. warpgroups: whether
    the four warps of a group multiply together. partners: two where blocks in pairs take the same tokens, each with
    rows of its own, and copy x for each other.
    """

    tokens: int
    row_groups: int
    phases: int
    slots: int
    warpgroups: bool
    partners: int = 1

    @property
    def groups(self) -> int:
        """Of four consumer warps, in a block."""
        return self.row_groups * self.phases

    @property
    def threads(self) -> int:
        """Of a block: the consumers, and a group that copies x."""
        return (self.groups + 1) * GROUP_WARPS * WARP_THREADS

    @property
    def box_rows(self) -> int:
        """Rows of x that a block copies at once: partners share a panel."""
        return self.tokens // self.partners

    @property
    def panels(self) -> int:
        """Panels of 64 columns in a stage of x."""
        return max(1, min(4, 128 // self.tokens))

    @property
    def stage_bytes(self) -> int:
        """A stage of x."""
        return self.panels * self.tokens * _PANEL_ROW_BYTES

    @property
    def tile_stages(self) -> int:
        """Stages of x in a k tile."""
        return TILE_K // PANEL_K // self.panels


@dataclass(frozen=True)
class GemmLayout:
    """How an instance is launched.

    ranges: parts of N, each with the rows of a block. whole_items: of the ranges times the tiles of tokens, those that
    a block does by itself; the k tiles of the others are shared out evenly among all blocks. stages: of x.
    shared_mem: bytes of a block. Where the shape has partners, a block is such a pair in all of the above but this.
    """

    shape: GemmShape
    ranges: int
    token_tiles: int
    whole_items: int
    blocks: int
    stages: int
    shared_mem: int

    @property
    def grid(self) -> int:
        """Blocks of the launch."""
        return self.blocks * self.shape.partners

    @property
    def shared_items(self) -> int:
        """Items whose k tiles are shared out."""
        return self.ranges * self.token_tiles - self.whole_items

    @property
    def partial_floats(self) -> int:
        """Sums of shared items that blocks write to memory for each other."""
        consumers = self.shape.groups * GROUP_WARPS * WARP_THREADS
        return self.grid * SHARED_ITEMS * self.shape.tokens // 2 * consumers if self.shared_items else 0


@dataclass(frozen=True)
class GemmProblem:
    """A weight in tiles and so many tokens on a GPU.

    segments: of a k tile that have a scale of their own. order: of the weight in memory.
    """

    weight_bits: int
    entries: int
    scale_bits: int
    segments: int
    n_tiles: int
    k_tiles: int
    tokens: int
    gpu: Gpu
    order: Order = Order.PLANES

    @property
    def offsets_apart(self) -> bool:
        """Whether the kernel adds offsets behind its tables."""
        return offsets_apart(self.order, self.weight_bits, self.entries)

    @property
    def slot_bytes(self) -> int:
        """Signs and scales of one tile."""
        segment = TILE_K // self.segments
        return GemvCase(self.weight_bits, segment, self.scale_bits, 1).tile_bytes(self.entries)

    @property
    def table_bytes(self) -> int:
        """The levels of one tile."""
        return table_bytes(self.order, self.weight_bits, self.segments, apart=self.offsets_apart)


def table_bytes(order: Order, weight_bits: int, segments: int, *, apart: bool) -> int:
    """The levels of one tile (kRowBytes in kernels/bcq/levels.cuh and grid.cuh); apart: offsets are added behind."""
    if order == Order.GRID:
        return segments * TILE_N * _VECTOR_BYTES
    tables = 8 if weight_bits <= 2 else 16 if weight_bits <= 4 else 32
    return segments * TILE_N * (tables + (FLOAT_BYTES if apart and weight_bits > 1 else 0))


def gemm_kernel(row: Architecture) -> Kernel | None:
    """The fused product that a generation has."""
    return next((kernel for kernel in FUSED if kernel in row.kernels), None)


def _shapes(it: GemmProblem) -> Iterator[GemmShape]:
    known: tuple[tuple[int, int, int, int], ...] = WARP_SHAPES
    warpgroups = Kernel.BCQ_GEMM_WGMMA in it.gpu.architecture.kernels
    if warpgroups:
        spilling = () if it.order == Order.GRID else _SPILLING.get((it.weight_bits, it.offsets_apart), ())
        known = tuple(numbers for numbers in _WARPGROUP_SHAPES if numbers not in spilling)
        known += () if it.weight_bits <= _FEW_BITS else _NARROW_SHAPES
    paired = _PAIRED_SHAPES if warpgroups and it.order.for_batches else ()
    return (GemmShape(*numbers, warpgroups, 2 if numbers in paired else 1) for numbers in known)


def whole_stages(shape: GemmShape, room: int) -> int:
    """Stages of x where there is room for so many; 0 for too few.

    Phases take tiles in turn, and a stage is always of the same phase: one that is ahead cannot take a stage for filled
    that another phase still waits for, as the parity of a barrier tells two fillings apart and no more.
    """
    round_stages = shape.phases * shape.tile_stages
    stages = min(GEMM_MOST_STAGES, room) // round_stages * round_stages
    return stages if stages > 1 else 0


def _fitted(it: GemmProblem, shape: GemmShape) -> Iterator[GemmLayout]:
    """Layouts with as many stages of x as there is room for: whole items alone, and those of the last round shared."""
    row_tiles, token_tiles = GROUP_WARPS * shape.row_groups, ceil(it.tokens / shape.tokens)
    if shape.partners > 1 and (it.n_tiles <= row_tiles or it.gpu.processors < shape.partners):
        return  # the other partner would have no rows, or no place
    ranges = ceil(it.n_tiles / (row_tiles * shape.partners))
    warps = shape.groups * GROUP_WARPS
    rings, tables = warps * shape.slots * it.slot_bytes, warps * 2 * it.table_bytes
    sums = (shape.phases - 1) * shape.row_groups * GROUP_WARPS * TILE_N * shape.tokens * FLOAT_BYTES
    own = rings + tables + sums
    room = it.gpu.architecture.shared_limit() - 2 * GEMM_BARRIER_BYTES  # where they begin is rounded up
    stages = whole_stages(shape, (room - own) // shape.stage_bytes)
    if not stages:
        return
    sizes = stages, 2 * GEMM_BARRIER_BYTES + own + stages * shape.stage_bytes
    items, processors = ranges * token_tiles, it.gpu.processors // shape.partners
    for whole, blocks in shares(items, it.k_tiles, processors):
        yield GemmLayout(shape, ranges, token_tiles, whole, blocks, *sizes)


def gemm_layouts(it: GemmProblem) -> list[GemmLayout]:
    """The layouts that fit, the one expected to be fastest first."""
    fitted = [layout for shape in _shapes(it) for layout in _fitted(it, shape)]
    return sorted(fitted, key=lambda layout: cycles(it, layout))


@cache
def gemm_fits(weight_bits: int, segment: int, row: Architecture) -> bool:
    """Whether a generation has a fused product with room for any weight of such planes and segments."""
    it = GemmProblem(weight_bits, weight_bits + 1, 2 * BITS_PER_BYTE, TILE_K // segment, 1, 1, 1, Gpu(row, 1))
    return gemm_kernel(row) is not None and bool(gemm_layouts(it))


@cache
def plan_gemm(it: GemmProblem) -> GemmLayout:
    """The layout for a problem. Raises KernelError where shared memory holds none."""
    layouts = gemm_layouts(it)
    if not layouts:
        raise KernelError(f"{SOURCES[Kernel.BCQ_GEMM_MMA].file}: no layout of {it} fits into shared memory")
    return layouts[0]


ARRANGE = CompileUnit(ARRANGE_SOURCE, "bcqArrange")


def gemm_arguments(it: GemmProblem, dtype: torch.dtype, shape: GemmShape) -> tuple[int, ...]:
    """Template arguments that instances for one weight and for experts have in common, behind the number of planes."""
    sizes = (shape.tokens, shape.row_groups, shape.phases, shape.slots)
    return (it.offsets_apart, DTYPE_CODES[dtype], *sizes)


@cache
def gemm_unit(it: GemmProblem, dtype: torch.dtype, shape: GemmShape) -> CompileUnit:
    """The instance for a problem, activations and a shape of gemm_layouts."""
    fine = it.order.for_batches and shape.tokens > GEMM_FEW_TOKENS and it.segments > _HALF_TILES
    arguments = (
        shape.warpgroups,
        it.weight_bits,
        it.order.number,
        *gemm_arguments(it, dtype, shape),
        fine,
        shape.partners,
    )
    return CompileUnit(SOURCES[Kernel.BCQ_GEMM_MMA], "bcqGemm", arguments)


def least_problems(row: Architecture, *, order: Order = Order.PLANES, segments: int = 1) -> Iterator[GemmProblem]:
    """One problem for every number of planes and place of their offsets."""
    for bits, entries in orders_of(order):
        yield GemmProblem(bits, entries, 2 * BITS_PER_BYTE, segments, 1, 1, 1, Gpu(row, 1), order)


def gemm_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    if gemm_kernel(row) is None:
        return
    yield ARRANGE
    for order in Order:
        segments = (1, _HALF_TILES + 1) if order.for_batches else (1,)
        problems = [it for count in segments for it in least_problems(row, order=order, segments=count)]
        units = (gemm_unit(it, dtype, shape) for it in problems for dtype in GEMM_TYPES for shape in _shapes(it))
        yield from dict.fromkeys(units)  # once where the number of segments makes no difference


def is_vectors(x: Tensor) -> bool:
    """Whether rows of x [M, K] are made of aligned 16-byte vectors."""
    return x.shape[1] % VECTOR_VALUES == 0 and x.data_ptr() % _VECTOR_BYTES == 0


def arrange_launch(
    unit: CompileUnit,
    x: Tensor,
    *,
    arranged: Argument,
    tokens: int,
    tile_tokens: int,
    bits: int,
    own: Mapping[str, Argument],
) -> Launch:
    """x [.., K] in the order of the fused product, so many tokens in tiles; own: arguments that only the unit has."""
    return Launch(
        unit,
        x.device,
        grid=(-(-x.shape[1] // TILE_K) * (TILE_K // (2 * PANEL_K)), -(-tokens // ARRANGE_TOKENS)),
        block=ARRANGE_THREADS,
        args={
            "x": x,
            "arranged": arranged,
            **own,
            "M": tokens,
            "K": x.shape[1],
            "tileTokens": tile_tokens,
            "bits": bits,
            "vectors": is_vectors(x),
        },
        overlap=True,
    )
