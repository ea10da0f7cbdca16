"""The fused product of many tokens: its instances, and which of them suits a weight.

kernels/bcq/gemm.cuh draws it. Planes become 16-bit floats in registers and meet x on tensor cores, so a weight is read
once, in its own bits, for every tile of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import Gpu
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.errors import KernelError
from quantkit.formats.planes import BITS_PER_BYTE, MAX_BITS
from quantkit.ops.bcq.instances import (
    ARRANGE_SOURCE,
    ARRANGE_THREADS,
    ARRANGE_TOKENS,
    FLOAT_BYTES,
    GEMM_BARRIER_BYTES,
    GEMM_CHUNK_TOKENS,
    GEMM_MOST_STAGES,
    GEMM_SUM_PADDING,
    PANEL_K,
    SOURCES,
    TILE_K,
    TILE_N,
    GemvCase,
)

FUSED = (Kernel.BCQ_GEMM_WGMMA, Kernel.BCQ_GEMM_MMA)
"""The fused products; a generation has one of them."""
GEMM_TYPES = (torch.float16, torch.bfloat16)
_GROUP_WARPS = 4
_SHORT_BYTES, _VECTOR_BYTES = 2, 16
_PANEL_ROW_BYTES = PANEL_K * _SHORT_BYTES
TOKEN_BAND = 4  # tiles of tokens that blocks work on at once, for x and the weights to stay in L2
_MANY_GROUPS, _FEW_BITS = 6, 4  # of consumers, and planes up to which shared memory and registers carry them
_OFFSETS_APART = (1, 4, 8)  # planes whose tables of levels leave no room for an offset (kernels/bcq/levels.cuh)
# (tokens, row groups, phases, slots) of an instance's tile, block and rings: what registers carry without spilling.
_WARPGROUP_SHAPES = (
    *((16, 3, 2, 2), (16, 2, 3, 2), (16, 3, 1, 3), (16, 1, 3, 3)),
    *((32, 3, 1, 3), (32, 1, 3, 3), (64, 3, 1, 3), (64, 1, 3, 3), (128, 3, 1, 3), (256, 2, 1, 3)),
)
_NARROW_SHAPES = ((64, 2, 1, 2),)  # of warpgroups, for many planes in narrow groups
_WARP_SHAPES = ((16, 2, 1, 3), (16, 1, 2, 3), (16, 1, 1, 2), (64, 1, 1, 3))
# What the choice of a layout goes by, in clock cycles of an H200: fitted to 730 times of layouts in 69 problems, in
# which the chosen layout took 0.3 % longer than the fastest on average and 11 % at most.
_EXPAND_CYCLES, _PLANE_CYCLES = 135, 115  # of a k tile and 64 rows; of each of its planes
_PRODUCT_CYCLES = {16: 0, 32: 92, 64: 588, 128: 742, 256: 1989}  # of the same, on top
_TILE_LATENCY = 2580  # of one tile, however few there are
_X_BYTES_PER_CYCLE = 27  # that a block gets from L2
_PART_CYCLES, _PHASE_CYCLES, _ROW_GROUP_CYCLES = 4420, 2000, 59  # to add up parts, phases, and a token's 64 rows
_CROWDED = 1.34  # times as long, where so many groups share a multiprocessor


@dataclass(frozen=True)
class GemmShape:
    """An instance without its types.

    tokens: of a tile. row_groups: groups of four consumer warps of a block, each with rows of its own. phases: as many
    times these groups, which take the k tiles of the same rows in turn. slots: of a warp's ring.
    """

    tokens: int
    row_groups: int
    phases: int
    slots: int

    @property
    def groups(self) -> int:
        """Of four consumer warps, in a block."""
        return self.row_groups * self.phases

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

    parts: blocks of a cluster, each with a
    part of K. ranges: parts of N, for one block or cluster at a time. stages: of x. shared_mem: bytes.
    """

    shape: GemmShape
    parts: int
    ranges: int
    stages: int
    shared_mem: int

    @property
    def threads(self) -> int:
        """Of a block: the consumers, and a group that copies x."""
        return (self.shape.groups + 1) * _GROUP_WARPS * WARP_THREADS


@dataclass(frozen=True)
class GemmProblem:
    """A weight in tiles and so many tokens on a GPU; segments: of a k tile that have a scale of their own."""

    weight_bits: int
    entries: int
    scale_bits: int
    segments: int
    n_tiles: int
    k_tiles: int
    tokens: int
    gpu: Gpu

    @property
    def offsets_apart(self) -> bool:
        """Whether the kernel adds offsets behind its tables."""
        return self.entries > self.weight_bits and self.weight_bits in _OFFSETS_APART

    @property
    def slot_bytes(self) -> int:
        """Signs and scales of one tile."""
        segment = TILE_K // self.segments
        return GemvCase(self.weight_bits, segment, self.scale_bits, 1).tile_bytes(self.entries)

    @property
    def table_bytes(self) -> int:
        """The levels of one tile (Levels::kRowBytes in kernels/bcq/levels.cuh)."""
        tables = 8 if self.weight_bits <= 2 else 16 if self.weight_bits <= 4 else 32
        apart = FLOAT_BYTES if self.offsets_apart and self.weight_bits > 1 else 0
        return self.segments * TILE_N * (tables + apart)


def gemm_kernel(row: Architecture) -> Kernel | None:
    """The fused product that a generation has."""
    return next((kernel for kernel in FUSED if kernel in row.kernels), None)


def _shapes(weight_bits: int, row: Architecture) -> Iterator[GemmShape]:
    known: tuple[tuple[int, int, int, int], ...] = _WARP_SHAPES
    if Kernel.BCQ_GEMM_WGMMA in row.kernels:
        known = _WARPGROUP_SHAPES + (() if weight_bits <= _FEW_BITS else _NARROW_SHAPES)
    shapes = (GemmShape(*numbers) for numbers in known)
    return (shape for shape in shapes if shape.groups < _MANY_GROUPS or weight_bits <= _FEW_BITS)


def _fitted(it: GemmProblem, shape: GemmShape, parts: int) -> GemmLayout | None:
    """The layout for one weight; None where it cannot be."""
    at_once = it.gpu.processors // parts
    ranges = _least_ranges(it, shape)
    if it.tokens <= shape.tokens:  # whole rounds of blocks, and none of them idle
        ranges = min(it.n_tiles, ceil(ranges / at_once) * at_once)
    if parts > 1 and ranges * ceil(it.tokens / shape.tokens) > at_once:
        return None  # a cluster works on one item: its sums take the place of x
    return _filled(it, shape, parts, ranges)


def _filled(it: GemmProblem, shape: GemmShape, parts: int, ranges: int) -> GemmLayout | None:
    """The layout with as many stages of x as there is room for; None where there is too little."""
    warps = shape.groups * _GROUP_WARPS
    rings, tables = warps * shape.slots * it.slot_bytes, warps * 2 * it.table_bytes
    sum_tokens = shape.tokens if parts > 1 else min(shape.tokens, GEMM_CHUNK_TOKENS)
    row_bytes = (shape.row_groups * _GROUP_WARPS * TILE_N + GEMM_SUM_PADDING) * FLOAT_BYTES
    sums = shape.phases * sum_tokens * row_bytes
    room = it.gpu.architecture.shared_limit() - 2 * GEMM_BARRIER_BYTES  # where they begin is rounded up
    own = rings + tables + (0 if parts > 1 else sums)
    stages = min(GEMM_MOST_STAGES, (room - own) // shape.stage_bytes)
    if stages < max(2, shape.phases * shape.tile_stages) or (parts > 1 and sums > room):
        return None
    used = own + stages * shape.stage_bytes
    shared_mem = 2 * GEMM_BARRIER_BYTES + (max(used, sums) if parts > 1 else used)
    return GemmLayout(shape, parts, ranges, stages, shared_mem)


def _cycles(it: GemmProblem, layout: GemmLayout, token_tiles: int) -> float:
    """How long a multiprocessor is busy with so many tiles of tokens, see the figures above."""
    shape, phases = layout.shape, layout.shape.phases
    items = layout.ranges * token_tiles
    rounds = ceil(items / (it.gpu.processors // layout.parts))
    busy_groups = phases * ceil(it.n_tiles / (layout.ranges * _GROUP_WARPS))
    tile = _EXPAND_CYCLES + it.weight_bits * _PLANE_CYCLES + _PRODUCT_CYCLES[shape.tokens]
    step = max(busy_groups * tile, _TILE_LATENCY + tile / 2, phases * shape.tokens * TILE_K * 2 / _X_BYTES_PER_CYCLE)
    steps = ceil(ceil(it.k_tiles / layout.parts) / phases)
    sums = (layout.parts - 1) * _PART_CYCLES + (phases - 1) * _PHASE_CYCLES
    sums += shape.tokens * shape.row_groups * _ROW_GROUP_CYCLES
    return rounds * (steps * step + sums) * (_CROWDED if shape.groups == _MANY_GROUPS else 1)


def _clusters(row: Architecture) -> tuple[int, ...]:
    """Parts of K that a layout may have, each for a block of a cluster."""
    return (1, 2) if row.clusters else (1,)


def gemm_layouts(it: GemmProblem) -> list[GemmLayout]:
    """The layouts that fit, the one expected to be fastest first."""
    clusters = _clusters(it.gpu.architecture) if it.k_tiles > 1 else (1,)
    fitted = [_fitted(it, shape, parts) for shape in _shapes(it.weight_bits, it.gpu.architecture) for parts in clusters]
    return _sorted(it, fitted, lambda shape: ceil(it.tokens / shape.tokens))


def spread_layouts(it: GemmProblem, token_tiles: Callable[[GemmShape], int]) -> list[GemmLayout]:
    """The same for tiles of tokens that multiply weights of their own; token_tiles: how many, by a layout's shape."""
    shapes = _shapes(it.weight_bits, it.gpu.architecture)
    return _sorted(it, [_filled(it, shape, 1, _least_ranges(it, shape)) for shape in shapes], token_tiles)


def _sorted(
    it: GemmProblem, layouts: Iterable[GemmLayout | None], token_tiles: Callable[[GemmShape], int]
) -> list[GemmLayout]:
    fitted = (layout for layout in layouts if layout is not None)
    return sorted(fitted, key=lambda layout: _cycles(it, layout, token_tiles(layout.shape)))


def _least_ranges(it: GemmProblem, shape: GemmShape) -> int:
    return ceil(it.n_tiles / (_GROUP_WARPS * shape.row_groups))


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
    """Template arguments of the instance for a problem, activations and a shape of gemm_layouts."""
    warpgroups = Kernel.BCQ_GEMM_WGMMA in it.gpu.architecture.kernels
    sizes = (shape.tokens, shape.row_groups, shape.phases, shape.slots)
    return (warpgroups, it.weight_bits, it.offsets_apart, DTYPE_CODES[dtype], *sizes)


@cache
def gemm_unit(it: GemmProblem, dtype: torch.dtype, shape: GemmShape) -> CompileUnit:
    """The instance for a problem, activations and a shape of gemm_layouts."""
    return CompileUnit(SOURCES[Kernel.BCQ_GEMM_MMA], "bcqGemm", gemm_arguments(it, dtype, shape))


def gemm_instances(
    row: Architecture, clusters: tuple[int, ...]
) -> Iterator[tuple[GemmProblem, torch.dtype, GemmShape]]:
    """What instances there are for on a GPU generation: shapes that shared memory holds for some weight.

    clusters: the parts of K that layouts may have.
    """
    for bits in range(1, MAX_BITS + 1):
        for entries in (bits, bits + 1) if bits in _OFFSETS_APART else (bits,):
            it = GemmProblem(bits, entries, BITS_PER_BYTE, 1, 1, 1, 1, Gpu(row, 1))  # no weight takes less
            fitting = [shape for shape in _shapes(bits, row) if any(_filled(it, shape, parts, 1) for parts in clusters)]
            for dtype in GEMM_TYPES:
                yield from ((it, dtype, shape) for shape in fitting)


def gemm_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    if gemm_kernel(row) is None:
        return
    yield ARRANGE
    for instance in gemm_instances(row, _clusters(row)):
        yield gemm_unit(*instance)


def is_vectors(x: Tensor) -> bool:
    """Whether rows of x [M, K] are made of aligned 16-byte vectors."""
    return x.shape[1] % (_VECTOR_BYTES // 2) == 0 and x.data_ptr() % _VECTOR_BYTES == 0


def arrange_launch(
    x: Tensor, arranged: Tensor, *, tile_tokens: int, bits: int, slots: Tensor | None = None, choices: int = 1
) -> Launch:
    """x [M, K] in the order of the fused product for weights of ``bits`` planes, tiles of so many tokens.

    slots: place m takes row slots[m] // choices instead of m, none where slots[m] is -1.
    """
    places = x.shape[0] if slots is None else slots.numel()
    return Launch(
        ARRANGE,
        x.device,
        grid=(arranged.shape[1] // (2 * PANEL_K), -(-places // ARRANGE_TOKENS)),
        block=ARRANGE_THREADS,
        args={
            "x": x,
            "arranged": arranged,
            "slots": slots,
            "choices": choices,
            "M": places,
            "K": x.shape[1],
            "tileTokens": tile_tokens,
            "bits": bits,
            "vectors": is_vectors(x),
        },
        overlap=True,
    )
