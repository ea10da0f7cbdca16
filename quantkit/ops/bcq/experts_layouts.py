"""The fused product of experts: its instances, and how they are launched (kernels/bcq/experts_gemm.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil

import torch

from quantkit.cuda.architectures import Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import Gpu
from quantkit.cuda.source import KernelSource
from quantkit.formats.planes import BITS_PER_BYTE
from quantkit.ops.bcq.gemm import (
    GEMM_TYPES,
    GemmProblem,
    gemm_arguments,
    gemm_kernel,
    least_problems,
)
from quantkit.ops.bcq.gemm_shapes import GROUP_WARPS, WARP_SHAPES, GemmShape, whole_stages
from quantkit.ops.bcq.instances import (
    CONSTANTS,
    EXPERTS_CHUNK_TOKENS,
    EXPERTS_SUM_PADDING,
    FLOAT_BYTES,
    GEMM_BARRIER_BYTES,
    TILE_K,
    TILE_N,
)

GEMM_SOURCE = KernelSource("bcq/experts_gemm.cu", CONSTANTS)
_MANY_GROUPS, _FEW_BITS = 6, 4  # of consumers, and planes up to which shared memory and registers carry them
# As in gemm.py.
_WARPGROUP_SHAPES = (
    *((16, 3, 2, 2), (16, 2, 3, 2), (16, 3, 1, 3), (16, 1, 3, 3)),
    *((32, 3, 1, 3), (32, 1, 3, 3), (64, 3, 1, 3), (64, 1, 3, 3), (128, 3, 1, 3), (256, 2, 1, 3)),
)
_NARROW_SHAPES = ((64, 2, 1, 2),)  # of warpgroups, for many planes in narrow groups
# What the choice of a layout goes by, in clock cycles of an H200: fitted to 730 times of products of one weight.
_EXPAND_CYCLES, _PLANE_CYCLES = 135, 115  # of a k tile and 64 rows; of each of its planes
_PRODUCT_CYCLES = {16: 0, 32: 92, 64: 588, 128: 742, 256: 1989}  # of the same, on top
_TILE_LATENCY = 2580  # of one tile, however few there are
_X_BYTES_PER_CYCLE = 27  # that a block gets from L2
_PHASE_CYCLES, _ROW_GROUP_CYCLES = 2000, 59  # to add up phases, and a token's 64 rows
_CROWDED = 1.34  # times as long, where so many groups share a multiprocessor


@dataclass(frozen=True)
class ExpertsLayout:
    """How an instance is launched.

    ranges: parts of N, for one block at a time. stages: of x. shared_mem: bytes.
    """

    shape: GemmShape
    ranges: int
    stages: int
    shared_mem: int


def _shapes(weight_bits: int, row: Architecture) -> Iterator[GemmShape]:
    known: tuple[tuple[int, int, int, int], ...] = WARP_SHAPES
    warpgroups = Kernel.BCQ_GEMM_WGMMA in row.kernels
    if warpgroups:
        known = _WARPGROUP_SHAPES + (() if weight_bits <= _FEW_BITS else _NARROW_SHAPES)
    shapes = (GemmShape(*numbers, warpgroups) for numbers in known)
    return (shape for shape in shapes if shape.groups < _MANY_GROUPS or weight_bits <= _FEW_BITS)


def _filled(it: GemmProblem, shape: GemmShape) -> ExpertsLayout | None:
    """The layout with as many stages of x as there is room for; None where there is too little."""
    warps = shape.groups * GROUP_WARPS
    rings, tables = warps * shape.slots * it.slot_bytes, warps * 2 * it.table_bytes
    row_bytes = (shape.row_groups * GROUP_WARPS * TILE_N + EXPERTS_SUM_PADDING) * FLOAT_BYTES
    own = rings + tables + shape.phases * min(shape.tokens, EXPERTS_CHUNK_TOKENS) * row_bytes
    room = it.gpu.architecture.shared_limit() - 2 * GEMM_BARRIER_BYTES  # where they begin is rounded up
    stages = whole_stages(shape, (room - own) // shape.stage_bytes)
    if not stages:
        return None
    ranges, shared_mem = ceil(it.n_tiles / (GROUP_WARPS * shape.row_groups)), own + stages * shape.stage_bytes
    return ExpertsLayout(shape, ranges, stages, 2 * GEMM_BARRIER_BYTES + shared_mem)


def _cycles(it: GemmProblem, layout: ExpertsLayout, experts: int) -> float:
    """How long a multiprocessor is busy, see the figures above.

    Experts get tokens unevenly, so the last tile of each is half full on average.
    """
    shape, phases, active = layout.shape, layout.shape.phases, min(it.tokens, experts)
    rounds = ceil(layout.ranges * ceil(max(active, it.tokens / shape.tokens + active / 2)) / it.gpu.processors)
    busy_groups = phases * ceil(it.n_tiles / (layout.ranges * GROUP_WARPS))
    tile = _EXPAND_CYCLES + it.weight_bits * _PLANE_CYCLES + _PRODUCT_CYCLES[shape.tokens]
    step = max(busy_groups * tile, _TILE_LATENCY + tile / 2, phases * shape.tokens * TILE_K * 2 / _X_BYTES_PER_CYCLE)
    sums = (phases - 1) * _PHASE_CYCLES + shape.tokens * shape.row_groups * _ROW_GROUP_CYCLES
    return rounds * (ceil(it.k_tiles / phases) * step + sums) * (_CROWDED if shape.groups == _MANY_GROUPS else 1)


def experts_layouts(it: GemmProblem, experts: int) -> list[ExpertsLayout]:
    """The layouts that fit for ``it.tokens`` pairs, the one expected to be fastest first."""
    filled = (_filled(it, shape) for shape in _shapes(it.weight_bits, it.gpu.architecture))
    return sorted((layout for layout in filled if layout is not None), key=lambda layout: _cycles(it, layout, experts))


@cache
def plan_experts(it: GemmProblem, experts: int) -> ExpertsLayout:
    """The layout that is expected to be fastest for ``it.tokens`` pairs."""
    return experts_layouts(it, experts)[0]


@cache
def experts_fit(weight_bits: int, segment: int, row: Architecture) -> bool:
    """Whether a generation has the product, and room for any weights of such planes and segments."""
    it = GemmProblem(weight_bits, weight_bits + 1, 2 * BITS_PER_BYTE, TILE_K // segment, 1, 1, 1, Gpu(row, 1))
    return gemm_kernel(row) is not None and bool(experts_layouts(it, 1))


def experts_gemm_unit(it: GemmProblem, dtype: torch.dtype, shape: GemmShape) -> CompileUnit:
    """The instance for a problem, activations and a shape of experts_layouts."""
    arguments = (shape.warpgroups, it.weight_bits, *gemm_arguments(it, dtype, shape))
    return CompileUnit(GEMM_SOURCE, "bcqExpertsGemm", arguments)


def experts_gemm_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    for it in least_problems(row):
        for dtype in GEMM_TYPES:
            yield from (experts_gemm_unit(it, dtype, shape) for shape in _shapes(it.weight_bits, row))
