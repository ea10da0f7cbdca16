"""The product that turns weight planes into codes in registers: its instances, layouts for a problem, and launches.

kernels/bipolar/gemm_fused.cuh draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import ceil

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARPGROUP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.counts import zero_counts
from quantkit.cuda.device import Gpu
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.cuda.source import KernelSource
from quantkit.formats.planes import MAX_BITS
from quantkit.ops.bipolar.instances import (
    BARRIER_BYTES,
    CONSTANTS,
    LINE_SETS,
    LINE_STRUCT_BYTES,
    SHARED_ALIGNMENT,
    WGMMA_SHARED_BYTES,
    codings,
)
from quantkit.ops.bipolar.layout import BITS_PER_LINE, BLOCK_ROWS, LINE_BYTES, LINES
from quantkit.ops.bipolar.product import Product
from quantkit.ops.items import SHARED_ITEMS, TOKEN_BAND, shares

_STAGE_BYTES = 32 << 10
_SPLIT_TOKENS = 64  # of an item, up to which there is room for the sums of other splits
_SPLITS = 2  # blocks of a cluster that may share an item
_CONSTANTS = {**CONSTANTS, "FUSED_STAGE_BYTES": _STAGE_BYTES, "SPLIT_TOKENS": _SPLIT_TOKENS}
_SOURCE = KernelSource("bipolar/gemm_fused.cu", _CONSTANTS)
TOKEN_TILES = (32, 64, 128, 256)
"""Tokens of an item."""
_MANY_TOKENS = 128  # from which stages of x are short
_MOST_SLOTS, _MOST_STAGES = 8, 4
_WORD_BYTES, _PLACE_BYTES, _MAILBOX_BYTES = 4, 8, 8
# What the layouts are compared by, in clocks of a processor: those of a product per column; bytes per clock from L2,
# and from memory to all of them; what handing sums over through L2 takes at least, and bytes of these per clock; the
# same where the blocks are of a cluster. Rates were fitted to 336 times of layouts in 46 problems on an H100: the
# chosen one took 0.6 % longer than the fastest on average and 5 % at most; with items of 64 rows too, in 28 problems,
# 0.4 % and 7 %.
_COLUMN_CLOCKS = 16
_L2_RATE, _MEMORY_RATE = 25, 2370
_HANDOVER_CLOCKS, _SUMS_RATE = 6000, 23
_EXCHANGE_CLOCKS = 800


@dataclass(frozen=True)
class FusedTile:
    """An instance: weight planes and tokens of an item. warpgroups: which multiply, each 64 rows of W.

    slots: of 64 rows and 1024 columns of planes, at least one more than warpgroups. stages: of x. coded: whether
    there are scale codes. splits: whether there is room for the sums of another block.
    """

    weight_bits: int
    tokens: int
    warpgroups: int
    slots: int
    stages: int
    coded: bool = False
    splits: bool = False

    @property
    def threads(self) -> int:
        """Of a block: a warpgroup more brings what the others need."""
        return (self.warpgroups + 1) * WARPGROUP_THREADS

    @property
    def rows(self) -> int:
        """Of W in an item."""
        return self.warpgroups * BLOCK_ROWS

    def stretch_clocks(self, blocks: int) -> float:
        """Clocks of 1024 columns of an item: of its products, or of bringing planes and x where that takes longer.

        blocks: of the launch, which read memory at the same time.
        """
        planes, x = self.warpgroups * self.slot_bytes, self.tokens * BITS_PER_LINE
        products = _COLUMN_CLOCKS * self.warpgroups * self.tokens
        return max(products, (planes + x) / _L2_RATE, planes * blocks / _MEMORY_RATE)

    @property
    def slot_bytes(self) -> int:
        """Planes of 64 rows and 1024 columns, and their scale codes."""
        scales = LINES * BLOCK_ROWS if self.coded else 0
        return self.weight_bits * BLOCK_ROWS * LINE_BYTES + scales

    @property
    def split_bytes(self) -> int:
        """The sums that a block receives of the other split."""
        return self.rows * self.tokens * _WORD_BYTES // _SPLITS if self.splits else 0

    def handover_clocks(self) -> float:
        """Clocks that a block takes for the sums of another one."""
        return _HANDOVER_CLOCKS + self.rows * self.tokens * _WORD_BYTES / _SUMS_RATE


@dataclass(frozen=True)
class FusedPlan:
    """How an instance is launched for y [M, N].

    row_tiles, token_tiles: items along N and M. whole_items: of these, those that a block does by itself; the stretches
    of the others are shared out evenly among all blocks. splits: blocks of a cluster that share the stretches of an
    item (split-K), 1 or 2.
    """

    tile: FusedTile
    row_tiles: int
    token_tiles: int
    whole_items: int
    blocks: int
    stretches: int
    splits: int = 1

    @property
    def shared_items(self) -> int:
        """Items that blocks share."""
        return self.row_tiles * self.token_tiles - self.whole_items

    @property
    def partial_words(self) -> int:
        """Sums that blocks leave for each other."""
        return self.blocks * SHARED_ITEMS * self.tile.rows * self.tile.tokens if self.shared_items else 0

    def clocks(self) -> float:
        """What the launch takes, expected."""
        stretch = self.tile.stretch_clocks(self.blocks)
        if self.splits > 1:
            return ceil(self.stretches / self.splits) * stretch + _EXCHANGE_CLOCKS
        whole = ceil(self.whole_items / self.blocks) * self.stretches
        shared = ceil(self.shared_items * self.stretches / self.blocks)
        even = not self.shared_items or self.blocks % self.shared_items == 0
        handover = (1 if even else SHARED_ITEMS) * self.tile.handover_clocks() if self.shared_items else 0
        return (whole + shared) * stretch + handover


def _static_bytes(tile: FusedTile) -> int:
    lines = LINE_SETS * (tile.rows + tile.tokens) * LINE_STRUCT_BYTES
    return lines + (_MOST_SLOTS + _MOST_STAGES + LINE_SETS) * BARRIER_BYTES + LINE_SETS * _PLACE_BYTES + _MAILBOX_BYTES


def _dynamic_bytes(tile: FusedTile) -> int:
    return SHARED_ALIGNMENT + tile.slots * tile.slot_bytes + tile.stages * _STAGE_BYTES + tile.split_bytes


def _fits(tile: FusedTile) -> bool:
    return _dynamic_bytes(tile) + _static_bytes(tile) <= WGMMA_SHARED_BYTES


@cache
def fused_tile(weight_bits: int, tokens: int, coded: bool = False, warpgroups: int = 2) -> FusedTile:
    """The instance for a number of planes and one of TOKEN_TILES. warpgroups: 1, or 2 where these find room.

    Room for the sums of splits comes before slots beyond one to spare, and these before stages of x beyond two, or
    three of many tokens.
    """
    least = 3 if tokens >= _MANY_TOKENS else 2
    splits = (True, False) if tokens <= _SPLIT_TOKENS else (False,)
    for groups, split, first in itertools.product(range(warpgroups, 0, -1), splits, dict.fromkeys((least, 2))):
        sized = partial(FusedTile, weight_bits, tokens, groups, coded=coded, splits=split)
        found = [sized(slots, first) for slots in range(1, _MOST_SLOTS + 1)]
        best = next((tile for tile in reversed(found) if _fits(tile)), None)
        if best is not None and best.slots > groups:
            more = [sized(best.slots, n) for n in range(first, _MOST_STAGES + 1)]
            return next(tile for tile in reversed(more) if _fits(tile))
    raise AssertionError(f"no room for {weight_bits} planes and {tokens} tokens")


def fused_tiles(weight_bits: int, coded: bool = False) -> list[FusedTile]:
    """The instances for a number of planes: of few tokens with one warpgroup too, for weights of few rows."""
    wide = [fused_tile(weight_bits, tokens, coded) for tokens in TOKEN_TILES]
    narrow = [fused_tile(weight_bits, tokens, coded, 1) for tokens in TOKEN_TILES if tokens <= _SPLIT_TOKENS]
    return list(dict.fromkeys((*wide, *narrow)))


def fused_unit(tile: FusedTile) -> CompileUnit:
    """bipolar_gemm_fused for a tile; its types are arguments of the launch."""
    sizes = (tile.weight_bits, tile.tokens, tile.warpgroups, tile.slots, tile.stages)
    return CompileUnit(_SOURCE, "bipolarGemmFused", (*sizes, tile.coded), _dynamic_bytes(tile))


def fused_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    if Kernel.BIPOLAR_FUSED_WGMMA in row.kernels:
        for weight_bits in range(1, MAX_BITS + 1):
            for coded in codings(weight_bits):
                yield from map(fused_unit, fused_tiles(weight_bits, coded))


def fused_layouts(tile: FusedTile, shape: tuple[int, int, int], processors: int) -> Iterator[FusedPlan]:
    """The layouts of a tile for shape (M, N, K): whole items, those of the last round shared, or each split."""
    m, n, k = shape
    counts = ceil(n / tile.rows), ceil(m / tile.tokens)
    stretches = ceil(k / BITS_PER_LINE)
    for whole, blocks in shares(counts[0] * counts[1], stretches, processors):
        yield FusedPlan(tile, *counts, whole, blocks, stretches)
    items = counts[0] * counts[1]
    if tile.splits and items * _SPLITS <= processors and stretches >= _SPLITS:
        yield FusedPlan(tile, *counts, items, items * _SPLITS, stretches, _SPLITS)


@cache
def plan_fused(weight_bits: int, shape: tuple[int, int, int], processors: int, coded: bool = False) -> FusedPlan:
    """The layout expected to be fastest for shape (M, N, K)."""
    tiles = fused_tiles(weight_bits, coded)
    return min((plan for tile in tiles for plan in fused_layouts(tile, shape, processors)), key=FusedPlan.clocks)


def _plan_of(product: Product, gpu: Gpu) -> FusedPlan:
    m, n = product.y.shape
    return plan_fused(product.planes[0], (m, n, product.in_features), gpu.processors, product.weight.coded)


def fused_tensors(product: Product, gpu: Gpu, plan: FusedPlan | None = None) -> dict[str, Tensor | None]:
    """What the product takes, by the names of its parameters: also memory by which its blocks hand over sums."""
    plan = plan or _plan_of(product, gpu)
    tensors = {**product.tensors_of_planes(), "partials": None, "ready": None}
    if plan.shared_items:
        device = product.y.device
        tensors["partials"] = torch.empty(plan.partial_words, dtype=torch.int32, device=device)
        tensors["ready"] = zero_counts(plan.shared_items, device)
    return tensors


def fused_launch(
    product: Product,
    gpu: Gpu,
    tensors: Mapping[str, Tensor | None],
    plan: FusedPlan | None = None,
) -> Launch:
    """y on the fused product. tensors: of fused_tensors. plan: another one than the planned."""
    plan = plan or _plan_of(product, gpu)
    return Launch(
        fused_unit(plan.tile),
        product.y.device,
        grid=(plan.blocks,),
        block=plan.tile.threads,
        args={
            **tensors,
            **product.sizes(),
            **product.limits(),
            "zero": int(product.zero),
            "dtype": DTYPE_CODES[product.y.dtype],
            "rowTiles": plan.row_tiles,
            "tokenTiles": plan.token_tiles,
            "tokenBand": TOKEN_BAND,
            "wholeItems": plan.whole_items,
            "splits": plan.splits,
        },
        overlap=product.weights_ready,
        cluster=plan.splits,
    )
