"""Products of experts: every pair of a token and an expert that it chose, in one launch.

The weights of all experts are one prepared weight after the other (layout.py). Which experts a token chose is known on
the GPU alone and stays there, so a CUDA graph can hold the product. Few pairs are products of one token each; many are
sorted by expert into tiles of tokens, which the fused product takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.cuda.parameters import Argument
from quantkit.cuda.source import KernelSource
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.formats.planes import MAX_BITS
from quantkit.ops.bcq.candidates import binary_segment
from quantkit.ops.bcq.experts_layouts import (
    ExpertsLayout,
    experts_fit,
    experts_gemm_unit,
    experts_gemm_units,
    plan_experts,
)
from quantkit.ops.bcq.gemm import GEMM_TYPES, arrange_launch, gemm_kernel, is_vectors
from quantkit.ops.bcq.gemm_launch import gemm_problem
from quantkit.ops.bcq.instances import (
    ARRANGE_SOURCE,
    CONSTANTS,
    FLOAT_BYTES,
    ROUTE_THREADS,
    SEGMENTS,
    TILE_K,
    GemvCase,
    GemvTile,
    gemv_tile,
)
from quantkit.ops.bcq.layout import BcqTiles, tile_counts
from quantkit.ops.bcq.plan import plan_gemv
from quantkit.ops.bcq.product import activation_segment, group_magic, weight_args
from quantkit.ops.items import TOKEN_BAND

GEMV_SOURCE = KernelSource("bcq/experts_gemv.cu", CONSTANTS)
ARRANGE = CompileUnit(ARRANGE_SOURCE, "bcqExpertsArrange")
ROUTE = CompileUnit(KernelSource("bcq/route.cu", CONSTANTS), "bcqRoute")
MOST_EXPERTS = 1024
"""Whose counts a block of bcqRoute keeps."""
_MOST_GEMV_PAIRS = 65535  # blocks along the third dimension of a grid
_MANY_REGISTERS = {  # of a target: bits, segment, scale bits that take more than a thread of 16 warps has
    "sm_80": {(4, 256, 16), (3, 32, 8), (2, 128, 16), (1, 128, 8)},
    "sm_90a": {(4, 256, 16), (3, 32, 8)},
}
_FEWER_WARPS = 8
_GEMV_SHARE = 2  # pairs an expert up to which products of one token are faster on an H200: many weights come from L2


class ExpertsKernel(StrEnum):
    """How the pairs are multiplied."""

    GEMV = "bcq_experts_gemv"
    GEMM = "bcq_experts_gemm"


@dataclass(frozen=True, eq=False)
class ExpertsProduct:
    """y [pairs, N] = x[p // choices] W_e^T + bias[e], e = chosen[p]; zeros where that is no expert.

    x: [pairs / choices, K], contiguous, fp16 or bf16. weight: of all experts one after the other; its out_features are
    those of one. bias: [experts, N] in x's type. chosen: [pairs] int64.
    """

    x: Tensor
    weight: BcqTiles
    bias: Tensor | None
    chosen: Tensor
    y: Tensor

    @property
    def pairs(self) -> int:
        """Of a token and a choice."""
        return self.chosen.numel()

    @property
    def choices(self) -> int:
        """Pairs that share a row of x."""
        return self.pairs // self.x.shape[0]

    @property
    def experts(self) -> int:
        """Whose weights there are."""
        return self.weight.tiles.shape[0] // tile_counts(self.weight.out_features, 1)[0]


def fits_experts(dtype: torch.dtype, row: Architecture, *, weight_bits: int, group_size: int, in_features: int) -> bool:
    """Whether a generation multiplies activations of ``dtype`` by experts of such weights in one launch."""
    segment = binary_segment(group_size, in_features)
    return dtype in GEMM_TYPES and segment is not None and experts_fit(weight_bits, segment, row)


def choose_experts_kernel(pairs: int, experts: int, row: Architecture) -> ExpertsKernel:
    """Products of one token where pairs are few beside the experts and the generation has them."""
    few = pairs <= _GEMV_SHARE * experts and pairs <= _MOST_GEMV_PAIRS
    return ExpertsKernel.GEMV if few and Kernel.BCQ_BINARY_GEMV in row.kernels else ExpertsKernel.GEMM


def experts_product(kernel: ExpertsKernel, product: ExpertsProduct) -> Tensor:
    """y through one of the kernels.

    Raises KernelError where neither takes such activations and weights (fits_experts), or there are too many experts.
    """
    weight, gpu = product.weight, gpu_of(product.x.device)
    shape = {"weight_bits": weight.weight_bits, "group_size": weight.group_size, "in_features": weight.in_features}
    if not fits_experts(product.x.dtype, gpu.architecture, **shape):
        raise KernelError(f"bcq_experts cannot multiply {product.x.dtype} by groups of {weight.group_size}")
    if product.experts > MOST_EXPERTS:
        raise KernelError(f"bcq_experts takes up to {MOST_EXPERTS} experts, not {product.experts}")
    if product.pairs:
        launches = (gemv_launch(product, gpu),) if kernel == ExpertsKernel.GEMV else gemm_launches(product, gpu)
        for launch in launches:
            launch.run()
    return product.y


def gemv_launch(product: ExpertsProduct, gpu: Gpu) -> Launch:
    """A product of one token for every pair, on binary tensor cores."""
    weight, pairs = product.weight, product.pairs
    segment = activation_segment(weight.group_size, weight.in_features, "bcq_experts needs")
    case = GemvCase(weight.weight_bits, segment, weight.scale_bits, tokens=1)
    counts = tile_counts(weight.out_features, weight.in_features)
    own = replace(gpu, processors=max(1, gpu.processors // pairs))  # of a pair: all of them run at once
    tile = _tile(case, gpu.architecture)
    plan = plan_gemv(case, entries=weight.entries, tile_counts=counts, gpu=own, tile=tile)
    range_tiles, long_ranges = divmod(counts[0], plan.blocks // plan.cluster)
    return Launch(
        _gemv_unit(case, gpu.architecture),
        product.x.device,
        grid=(plan.blocks, 1, pairs),
        block=plan.warps * WARP_THREADS,
        args={
            **_common_args(product),
            "x": product.x,
            "chosen": product.chosen,
            "experts": product.experts,
            "choices": product.choices,
            "groupMagic": group_magic(weight.group_size, weight.in_features, segment),
            "passTiles": plan.pass_tiles,
            "rangeTiles": range_tiles,
            "longRanges": long_ranges,
            "dtype": DTYPE_CODES[product.x.dtype],
            "vectors": is_vectors(product.x),
        },
        shared_mem=plan.shared_mem,
        overlap=True,
        cluster=plan.cluster,
    )


def gemm_launches(product: ExpertsProduct, gpu: Gpu, layout: ExpertsLayout | None = None) -> tuple[Launch, ...]:
    """Pairs sorted into tiles of tokens of one expert, x in that order, and the fused product.

    layout: another one than the planned, for tuning.
    """
    weight, pairs, device = product.weight, product.pairs, product.x.device
    it = gemm_problem(weight, pairs, gpu)
    layout = layout or plan_experts(it, product.experts)
    tile_tokens = layout.shape.tokens
    most_tiles = _most_tiles(pairs, product.experts, tile_tokens)
    slots = torch.empty(most_tiles * tile_tokens, dtype=torch.int32, device=device)
    tile_experts, tile_count = slots.new_empty(most_tiles), slots.new_empty(1)
    arranged = product.x.new_empty(slots.numel(), it.k_tiles * TILE_K)
    found = {"slots": slots, "tileExperts": tile_experts, "tileCount": tile_count}
    sizes = {"pairs": pairs, "experts": product.experts, "tileTokens": tile_tokens, "mostTiles": most_tiles}
    route = Launch(
        ROUTE,
        device,
        grid=(1,),
        block=ROUTE_THREADS,
        args={"chosen": product.chosen, **found, "y": product.y, **sizes, "N": weight.out_features},
        shared_mem=ROUTE_THREADS // WARP_THREADS * product.experts * FLOAT_BYTES,
        overlap=True,
    )
    arrange = arrange_launch(
        ARRANGE,
        product.x,
        arranged=arranged,
        tokens=slots.numel(),
        tile_tokens=tile_tokens,
        bits=it.weight_bits,
        own={"slots": slots, "choices": product.choices},
    )
    range_tiles, long_ranges = divmod(it.n_tiles, layout.ranges)
    multiply = Launch(
        experts_gemm_unit(it, product.x.dtype, layout.shape),
        device,
        grid=(min(layout.ranges * most_tiles, gpu.processors),),
        block=layout.shape.threads,
        args={
            **_common_args(product),
            **found,
            "x": arranged,
            "groupMagic": group_magic(weight.group_size, weight.in_features, TILE_K // it.segments),
            "scaleBits": it.scale_bits,
            "segments": it.segments,
            "stages": layout.stages,
            "rangeTiles": range_tiles,
            "longRanges": long_ranges,
            "ranges": layout.ranges,
            "tokenBand": TOKEN_BAND,
        },
        shared_mem=layout.shared_mem,
        overlap=True,
    )
    return route, arrange, multiply


def _common_args(product: ExpertsProduct) -> dict[str, Argument]:
    return {**weight_args(product.weight), "bias": product.bias, "y": product.y}


def _most_tiles(pairs: int, experts: int, tile_tokens: int) -> int:
    """Tiles that pairs can take, however they are routed: all but one place of an expert's last tile may be empty."""
    active = min(pairs, experts)
    return active + (pairs - active) // tile_tokens


def _tile(case: GemvCase, row: Architecture) -> GemvTile:
    wide = (case.weight_bits, case.segment, case.scale_bits) in _MANY_REGISTERS.get(row.target, ())
    return gemv_tile(case, row, most_warps=_FEWER_WARPS) if wide else gemv_tile(case, row)


def _gemv_unit(case: GemvCase, row: Architecture) -> CompileUnit:
    tile = _tile(case, row)
    arguments = (case.weight_bits, case.segment, case.scale_bits, tile.warps, tile.step_tiles, tile.stages)
    return CompileUnit(GEMV_SOURCE, "bcqExpertsGemv", arguments)


def experts_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance that can be asked for on a GPU generation."""
    if Kernel.BCQ_BINARY_GEMV in row.kernels:
        for bits in range(1, MAX_BITS + 1):
            for segment in SEGMENTS:
                for scale_bits in SCALE_BITS:
                    yield _gemv_unit(GemvCase(bits, segment, scale_bits, tokens=1), row)
    if gemm_kernel(row) is not None:
        yield ROUTE
        yield ARRANGE
        yield from experts_gemm_units(row)
