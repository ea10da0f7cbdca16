"""The GEMV of a weight in the order for batches: its instances, which of them suits a weight, and its launch.

kernels/bcq/level_loop.cuh draws it. Up to 16 tokens at once; one costs as much as eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import ceil

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.formats.planes import BITS_PER_BYTE
from quantkit.ops.bcq.gemm import GEMM_TYPES, table_bytes
from quantkit.ops.bcq.instances import CLUSTER_BLOCKS, FLOAT_BYTES, MAILBOX_BYTES, SEGMENTS, SOURCES, TILE_K, TILE_N
from quantkit.ops.bcq.instances import GemvCase as TileSizes
from quantkit.ops.bcq.layout import BcqSizes, tile_counts
from quantkit.ops.bcq.order import Order, offsets_apart, orders_of
from quantkit.ops.bcq.product import Product, activation_segment, group_magic

LEVEL_SEGMENTS = SEGMENTS[1:]  # wider groups take the widest of these
TOKENS = (8, 16)
_SHORT_BYTES, _PADDING_BYTES = 2, 16  # of an element of x; of a record for each token
_LEAST_SUMMED = 128  # columns of a segment of a grid, from which on steps and offsets meet sums (grid_step.cuh)
_FEW_PLANES = 4
_WARPS = {
    "sums": (12,),
    "sums, little memory": (12, 8),
    "few": (16,),
    "few, little memory": (16, 8),
    "many": (12, 8),
    "many, little memory": (8, 4),
}
"""Warps of a block by planes. Every instance is compiled and tested, so few are made."""
_LARGE_SHARED_MEMORY = 160 * 1024
# What the choice of a layout goes by, in microseconds of an H200 at four planes: of a tile of a block and of a block's
# beginning and end, by its warps; of a kilobyte of x; of an n tile whose sums two blocks exchange.
_TILE_TIME, _FIXED_TIME = {16: 0.078, 12: 0.085, 8: 0.1, 4: 0.2}, {16: 4.5, 12: 4.4, 8: 3.5, 4: 3.0}
_X_TIME, _EXCHANGE_TIME = 0.023, 0.05
_SUMS_TIMES = {1: (0.074, 3.0), 2: (0.064, 3.65)}  # of a tile and of beginning and end by stages, where sums meet steps


@dataclass(frozen=True)
class LevelShape:
    """An instance without its weight: tokens at once, warps of a block."""

    tokens: int
    warps: int


@dataclass(frozen=True)
class LevelLayout:
    """How an instance is launched.

    cluster: blocks that share n tiles, each with a part of K. blocks: all, per group of tokens. pass_tiles: k tiles of
    x that a block holds at once. stages: of a warp's ring. shared_mem: bytes.
    """

    shape: LevelShape
    cluster: int
    blocks: int
    pass_tiles: int
    passes: int
    stages: int
    shared_mem: int


@dataclass(frozen=True)
class LevelProblem:
    """A weight in tiles and so many tokens on a GPU; segment: columns that share levels."""

    weight_bits: int
    entries: int
    scale_bits: int
    segment: int
    n_tiles: int
    k_tiles: int
    tokens: int
    gpu: Gpu
    order: Order = Order.CODES

    @property
    def offsets_apart(self) -> bool:
        """Whether the kernel adds offsets behind its tables."""
        return offsets_apart(self.order, self.weight_bits, self.entries)

    @property
    def tile_bytes(self) -> int:
        """Codes and scales of one tile."""
        return TileSizes(self.weight_bits, self.segment, self.scale_bits, 1).tile_bytes(self.entries)

    @property
    def sums_x(self) -> bool:
        """Whether steps and offsets meet sums, of which those of x are kept."""
        return self.order == Order.GRID and self.segment >= _LEAST_SUMMED

    @property
    def level_bytes(self) -> int:
        """The levels of one tile."""
        if self.sums_x:
            return 0
        return table_bytes(self.order, self.weight_bits, TILE_K // self.segment, apart=self.offsets_apart)

    def x_bytes(self, tokens: int) -> int:
        """What a block keeps of one k tile of x."""
        sums = TILE_K // self.segment * FLOAT_BYTES if self.sums_x else 0
        return tokens * (TILE_K * _SHORT_BYTES + _PADDING_BYTES + sums)


def _fitted(it: LevelProblem, shape: LevelShape, cluster: int, rounds: int, stages: int) -> LevelLayout | None:
    """With all of a block's x, or in as few passes over it as there is room for."""
    tokens, warps = shape.tokens, shape.warps
    ranges = min(it.n_tiles, rounds * (it.gpu.processors // cluster))
    n_tiles, k_tiles = ceil(it.n_tiles / ranges), ceil(it.k_tiles / cluster)
    sums = warps * (ceil(n_tiles / warps) + 1) * TILE_N * tokens
    received = n_tiles * TILE_N * tokens // 2 if cluster > 1 else 0
    own = warps * (it.level_bytes + stages * it.tile_bytes) + (sums + received) * FLOAT_BYTES
    own += MAILBOX_BYTES if it.gpu.architecture.clusters else 0
    fitting = (it.gpu.architecture.shared_limit() - own) // it.x_bytes(tokens)
    if fitting <= 0:
        return None
    passes = ceil(k_tiles / fitting)
    pass_tiles = ceil(k_tiles / passes)
    shared_mem = own + pass_tiles * it.x_bytes(tokens)
    return LevelLayout(shape, cluster, ranges * cluster, pass_tiles, passes, stages, shared_mem)


def _shapes(it: LevelProblem, tokens: int) -> list[LevelShape]:
    kind = "sums" if it.sums_x else "many" if it.weight_bits > _FEW_PLANES else "few"
    bytes_as_levels = it.order == Order.GRID and it.weight_bits == BITS_PER_BYTE and not it.sums_x
    crowded = bytes_as_levels and not it.gpu.architecture.clusters  # twelve warps spill in bf16 there
    if crowded or it.gpu.architecture.shared_limit() < _LARGE_SHARED_MEMORY:
        kind = f"{kind}, little memory"
    return [LevelShape(tokens, warps) for warps in _WARPS[kind]]


def _expected(it: LevelProblem, layout: LevelLayout) -> float:
    """How long a multiprocessor is busy, see the figures above."""
    ranges, warps = layout.blocks // layout.cluster, layout.shape.warps
    n_tiles, k_tiles = ceil(it.n_tiles / ranges), ceil(it.k_tiles / layout.cluster)
    rounds = ceil(layout.blocks / (it.gpu.processors // layout.cluster * layout.cluster))
    tiles = ceil(n_tiles * k_tiles / warps) * warps
    x = k_tiles * it.x_bytes(layout.shape.tokens) / 1024 * _X_TIME
    exchange = n_tiles * _EXCHANGE_TIME if layout.cluster > 1 else 0.0
    tile, fixed = _SUMS_TIMES[layout.stages] if it.sums_x else (_TILE_TIME[warps], _FIXED_TIME[warps])
    return rounds * (tiles * tile + fixed + x + exchange + layout.passes - 1)


def level_layouts(it: LevelProblem) -> list[LevelLayout]:
    """The layouts that fit, the one expected to be fastest first."""
    clusters = (CLUSTER_BLOCKS, 1) if it.gpu.architecture.clusters and it.k_tiles > 1 else (1,)
    shapes = _shapes(it, next(least for least in TOKENS if least >= min(it.tokens, TOKENS[-1])))
    for rounds in count(1):
        found = [
            _fitted(it, shape, cluster, rounds, stages)
            for shape in shapes
            for cluster in clusters
            for stages in (_SUMS_TIMES if it.sums_x else (1,))
        ]
        layouts = [layout for layout in found if layout is not None]
        if layouts or rounds * it.gpu.processors > it.n_tiles:
            break
    return sorted(layouts, key=lambda layout: _expected(it, layout))


@cache
def plan_level(it: LevelProblem) -> LevelLayout:
    """The layout for a problem. Raises KernelError where shared memory holds none."""
    layouts = level_layouts(it)
    if not layouts:
        raise KernelError(f"{SOURCES[Kernel.BCQ_LEVEL_GEMV].file}: no layout of {it} fits into shared memory")
    return layouts[0]


@cache
def level_unit(it: LevelProblem, dtype: torch.dtype, shape: LevelShape) -> CompileUnit:
    """The instance for a problem, activations and a shape of level_layouts."""
    sizes = it.order.number, it.weight_bits, it.segment, shape.tokens, shape.warps
    arguments = (*sizes, it.offsets_apart, DTYPE_CODES[dtype])
    return CompileUnit(SOURCES[Kernel.BCQ_LEVEL_GEMV], "bcqLevelGemv", arguments)


def level_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    for order in (Order.CODES, Order.GRID):
        for bits, entries in orders_of(order):
            for segment in LEVEL_SEGMENTS:
                it = LevelProblem(bits, entries, SCALE_BITS[0], segment, 1, 1, 1, Gpu(row, 1), order)
                shapes = [shape for tokens in TOKENS for shape in _shapes(it, tokens)]
                yield from (level_unit(it, dtype, shape) for dtype in GEMM_TYPES for shape in shapes)


@cache
def _problem(sizes: BcqSizes, tokens: int, gpu: Gpu) -> LevelProblem:
    segment = activation_segment(sizes.group_size, sizes.in_features, f"{Kernel.BCQ_LEVEL_GEMV} needs")
    width = min(segment, LEVEL_SEGMENTS[0])
    counts = tile_counts(sizes.out_features, sizes.in_features)
    return LevelProblem(sizes.weight_bits, sizes.entries, sizes.scale_bits, width, *counts, tokens, gpu, sizes.order)


def level_problem(product: Product, gpu: Gpu) -> LevelProblem:
    """What the layout depends on. Raises KernelError where the group size is no multiple of 32."""
    return _problem(product.weight.sizes, product.x.shape[0], gpu)


def level_launch(product: Product, gpu: Gpu, layout: LevelLayout | None = None) -> Launch:
    """The product of a weight in the order for batches; any M, made for up to 16.

    layout: another one than the planned, for tuning. Raises KernelError where the group size is no multiple of 32.
    """
    it, sizes = level_problem(product, gpu), product.weight.sizes
    layout = layout or plan_level(it)
    range_tiles, long_ranges = divmod(it.n_tiles, layout.blocks // layout.cluster)
    return Launch(
        level_unit(it, product.x.dtype, layout.shape),
        product.x.device,
        grid=(layout.blocks, ceil(it.tokens / layout.shape.tokens)),
        block=layout.shape.warps * WARP_THREADS,
        args={
            **product.args(),
            **product.epilogue_args(),
            "groupMagic": group_magic(sizes.group_size, sizes.in_features, it.segment),
            "passTiles": layout.pass_tiles,
            "rangeTiles": range_tiles,
            "longRanges": long_ranges,
            "stages": layout.stages,
        },
        shared_mem=layout.shared_mem,
        overlap=product.weights_ready,
        cluster=layout.cluster,
    )


def level_gemv(product: Product, layout: LevelLayout | None = None) -> Tensor:
    """y, see level_launch."""
    level_launch(product, gpu_of(product.x.device), layout).run()
    return product.y
