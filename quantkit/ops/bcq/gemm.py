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
from quantkit.ops.bcq.gemm_shapes import (
    GROUP_WARPS,
    NARROW_SHAPES,
    NUMBER_SHAPES,
    PAIRED_SHAPES,
    SPILLING,
    WARP_SHAPES,
    WARPGROUP_SHAPES,
    WIDE_SHAPES,
    GemmShape,
    whole_stages,
)
from quantkit.ops.bcq.instances import (
    ARRANGE_SOURCE,
    ARRANGE_THREADS,
    ARRANGE_TOKENS,
    FLOAT_BYTES,
    GEMM_BARRIER_BYTES,
    GEMM_FEW_TOKENS,
    GEMM_NUMBER_TOKENS,
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
_SHORT_BYTES, _VECTOR_BYTES = 2, 16
VECTOR_VALUES = _VECTOR_BYTES // _SHORT_BYTES
"""Elements of x in 16 bytes."""
_HALF_TILES = 2  # of a k tile: segments of as many or fewer do not change within them
_SPLITS = 2  # blocks of a cluster that share k tiles
_FEW_BITS = 4  # planes up to which shared memory carries the other shapes at any group size


@dataclass(frozen=True)
class GemmLayout:
    """How an instance is launched.

    ranges: parts of N, each with the rows of a block. whole_items: of the ranges times the tiles of tokens, those that
    a block does by itself; the k tiles of the others are shared out evenly among all blocks. stages: of x.
    shared_mem: bytes of a block. splits: blocks of a cluster that share the k tiles of one item (split-K), 1 or 2.
    spare: blocks without an item, on processors that would do nothing, which only bring the code that comes last into
    the cache of all (kernels/bcq/gemm_sums.cuh).
    Where it has two, or the shape has partners, a block is such a cluster in all of the above but shared_mem.
    """

    shape: GemmShape
    ranges: int
    token_tiles: int
    whole_items: int
    blocks: int
    stages: int
    shared_mem: int
    splits: int = 1
    spare: int = 0

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return self.shape.partners * self.splits

    @property
    def grid(self) -> int:
        """Blocks of the launch."""
        return (self.blocks + self.spare) * self.cluster

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

    @property
    def fine(self) -> bool:
        """Whether levels change within half a tile."""
        return self.segments > _HALF_TILES

    def has_numbers(self, shape: GemmShape) -> bool:
        """Whether an instance has a form that multiplies numbers, and so another one for fine levels."""
        return self.order == Order.GRID and shape.warpgroups and shape.tokens <= GEMM_NUMBER_TOKENS

    def multiplies_numbers(self, shape: GemmShape) -> bool:
        """Whether an instance multiplies numbers in the place of levels (kernels/bcq/gemm_numbers.cuh)."""
        return self.has_numbers(shape) and not self.fine


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
        known = WARPGROUP_SHAPES
        if it.weight_bits > _FEW_BITS:
            known += NARROW_SHAPES
        elif it.order.for_batches:
            known += WIDE_SHAPES
        spilling = SPILLING.get((it.order, it.weight_bits, it.offsets_apart), ())
        known = tuple(numbers for numbers in known if numbers not in spilling)
        if it.order == Order.GRID and not it.fine:
            many = tuple(numbers for numbers in known if numbers[0] > GEMM_NUMBER_TOKENS)
            known = NUMBER_SHAPES[it.weight_bits] + many
    paired = PAIRED_SHAPES if warpgroups else ()
    return (GemmShape(*numbers, warpgroups, 2 if numbers in paired else 1) for numbers in known)


def _fitted(it: GemmProblem, shape: GemmShape) -> Iterator[GemmLayout]:
    """Layouts with as many stages of x as there is room for.

    Whole items alone, those of the last round shared, and each split where the GPU holds two blocks for every item.
    """
    row_tiles, token_tiles = GROUP_WARPS * shape.row_groups, ceil(it.tokens / shape.tokens)
    if shape.partners > 1 and (it.n_tiles <= row_tiles or it.gpu.processors < shape.partners):
        return  # the other partner would have no rows, or no place
    ranges = ceil(it.n_tiles / (row_tiles * shape.partners))
    warps = shape.groups * GROUP_WARPS
    rings, tables = warps * shape.slots * it.slot_bytes, warps * 2 * it.table_bytes
    sums = (shape.phases - 1) * shape.row_groups * GROUP_WARPS * TILE_N * shape.tokens * FLOAT_BYTES
    numbers = it.multiplies_numbers(shape)
    if numbers and shape.tokens < min(it.tokens, GEMM_NUMBER_TOKENS):
        return  # the weight would be read again where it takes longest
    if shape.row_groups == 1 and shape.tokens > GEMM_FEW_TOKENS and token_tiles > 1:
        return  # as much of x would be read again for every 64 rows, by more blocks
    own = rings + sums + (0 if numbers else tables)
    stage_bytes = shape.stage_bytes + (shape.sum_bytes if numbers else 0)
    room = it.gpu.architecture.shared_limit() - 2 * GEMM_BARRIER_BYTES  # where they begin is rounded up
    stages = whole_stages(shape, (room - own) // stage_bytes)
    if not stages:
        return
    sizes = stages, 2 * GEMM_BARRIER_BYTES + own + stages * stage_bytes
    items, processors = ranges * token_tiles, it.gpu.processors // shape.partners
    for whole, blocks in shares(items, it.k_tiles, processors):
        spare = int(shape.warpgroups and whole == blocks == items < processors)
        yield GemmLayout(shape, ranges, token_tiles, whole, blocks, *sizes, spare=spare)
    own += shape.split_bytes
    stages = whole_stages(shape, (room - own) // stage_bytes)
    if _may_split(it, shape) and items * _SPLITS <= processors and it.k_tiles >= _SPLITS and stages:
        shared_mem = 2 * GEMM_BARRIER_BYTES + own + stages * stage_bytes
        spare = int((items + 1) * _SPLITS <= processors)
        yield GemmLayout(shape, ranges, token_tiles, items, items, stages, shared_mem, _SPLITS, spare)


def _may_split(it: GemmProblem, shape: GemmShape) -> bool:
    return it.gpu.architecture.clusters and shape.warpgroups and shape.partners == 1


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
    fine = it.order.for_batches and it.fine and (shape.tokens > GEMM_FEW_TOKENS or it.has_numbers(shape))
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


def arrange_grid(tokens: int, in_features: int) -> tuple[int, int]:
    """Blocks that put rows in order, of two panels and ARRANGE_TOKENS tokens each, up to the end of a k tile."""
    return -(-in_features // TILE_K) * (TILE_K // (2 * PANEL_K)), -(-tokens // ARRANGE_TOKENS)


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
        grid=arrange_grid(tokens, x.shape[1]),
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
