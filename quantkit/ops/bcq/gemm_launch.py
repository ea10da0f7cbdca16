"""The launches of the fused product of many tokens.

In a prompt the host queues one product after the other, and often takes longer than the GPU. So all that does not
depend on where tensors are is worked out once for a shape, and what a call needs of memory is one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.counts import zero_counts
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import Launch
from quantkit.cuda.parameters import Argument, Within
from quantkit.cuda.tensor_map import TensorMap
from quantkit.ops.bcq.arranged import InputOrder
from quantkit.ops.bcq.gemm import (
    ARRANGE,
    VECTOR_VALUES,
    GemmLayout,
    GemmProblem,
    arrange_launch,
    gemm_unit,
    is_vectors,
    plan_gemm,
)
from quantkit.ops.bcq.gemm_shapes import GemmShape
from quantkit.ops.bcq.instances import FLOAT_BYTES, PANEL_K, TILE_K
from quantkit.ops.bcq.layout import BcqSizes, BcqTiles, tile_counts
from quantkit.ops.bcq.product import Product, activation_segment, group_magic, weight_args
from quantkit.ops.items import TOKEN_BAND

_PLANS = 4096  # that are kept: some shapes, with many numbers of tokens each
_ALIGNMENT = 256  # bytes, that of an allocation


@dataclass(frozen=True, eq=False)
class _Plan:
    """A fused product without its tensors.

    args: of its kernel, without pointers. partials: where these begin in the work memory, in bytes, behind x in order.
    work_bytes: of both.
    """

    unit: CompileUnit
    layout: GemmLayout
    args: Mapping[str, Argument]
    partials: int
    work_bytes: int

    @property
    def counts(self) -> int:
        """By which blocks that share items wait for each other."""
        return self.layout.shared_items * self.layout.shape.partners


def gemm_problem(weight: BcqTiles, tokens: int, gpu: Gpu) -> GemmProblem:
    """What the fused product's layout depends on. Raises KernelError where the group size is no multiple of 32."""
    return _problem(weight.sizes, tokens, gpu)


def gemm_launches(product: Product, gpu: Gpu, layout: GemmLayout | None = None) -> tuple[Launch, ...]:
    """The fused product, for many tokens; of sign planes behind a launch that puts x in the order of the products.

    layout: another one than the planned, for tuning. Raises KernelError where the group size is no multiple of 32.
    """
    x, weight = product.x, product.weight
    plan = _plan(weight.sizes, x.shape[0], x.dtype, gpu, layout)
    work = torch.empty(plan.work_bytes, dtype=torch.uint8, device=x.device)
    arranged = Within(work, 0)
    multiply = Launch(
        plan.unit,
        x.device,
        grid=(plan.layout.grid,),
        block=plan.layout.shape.threads,
        args={
            **weight_args(weight),
            **product.epilogue_args(),
            **plan.args,
            **(_rows(x, plan.layout.shape) if weight.order.for_batches else {"x": arranged, "xMap": None}),
            "partials": Within(work, plan.partials),
            "ready": zero_counts(plan.counts, x.device),
        },
        shared_mem=plan.layout.shared_mem,
        overlap=product.weights_ready,
        cluster=plan.layout.cluster,
    )
    if weight.order.for_batches:
        return (multiply,)
    sizes = {"tokens": x.shape[0], "tile_tokens": plan.layout.shape.tokens, "bits": weight.weight_bits}
    return arrange_launch(ARRANGE, x, arranged=arranged, **sizes, own={}), multiply


def gemm_work(product: Product, gpu: Gpu) -> tuple[int, int, int]:
    """Of the planned launches: bytes of work memory, where sums for other blocks begin in it, and counts of those."""
    plan = _plan(product.weight.sizes, product.x.shape[0], product.x.dtype, gpu, None)
    return plan.work_bytes, plan.partials, plan.counts


def gemm_input_order(product: Product, gpu: Gpu) -> InputOrder | None:
    """Of the planned launches: how the product reads x; None where it takes rows as they are."""
    weight, (tokens, _) = product.weight, product.x.shape
    if weight.order.for_batches:
        return None
    plan = _plan(weight.sizes, tokens, product.x.dtype, gpu, None)
    return InputOrder(weight.weight_bits, plan.layout.shape.tokens, plan.work_bytes)


def gemm(product: Product, layout: GemmLayout | None = None) -> Tensor:
    """y, see gemm_launches."""
    for launch in gemm_launches(product, gpu_of(product.x.device), layout):
        launch.run()
    return product.y


def _rows(x: Tensor, shape: GemmShape) -> dict[str, Argument]:
    """x as the order for batches takes it: rows of aligned vectors, with zeros behind them where x has others."""
    if not is_vectors(x):
        x = pad(x, (0, -x.shape[1] % VECTOR_VALUES)) if x.shape[1] % VECTOR_VALUES else x.clone()
    columns = {"K": x.shape[1]}
    if shape.warpgroups:
        return {"x": None, "xMap": TensorMap(x, shape.box_rows, PANEL_K), **columns}
    return {"x": x, "xMap": None, **columns}


def _problem(sizes: BcqSizes, tokens: int, gpu: Gpu) -> GemmProblem:
    segments = TILE_K // activation_segment(sizes.group_size, sizes.in_features, "bcq_gemm needs")
    counts = tile_counts(sizes.out_features, sizes.in_features)
    return GemmProblem(sizes.weight_bits, sizes.entries, sizes.scale_bits, segments, *counts, tokens, gpu, sizes.order)


@lru_cache(_PLANS)
def _plan(sizes: BcqSizes, tokens: int, dtype: torch.dtype, gpu: Gpu, layout: GemmLayout | None) -> _Plan:
    it = _problem(sizes, tokens, gpu)
    layout = layout or plan_gemm(it)
    range_tiles, long_ranges = divmod(it.n_tiles, layout.ranges * layout.shape.partners)
    args: dict[str, Argument] = {
        "groupMagic": group_magic(sizes.group_size, sizes.in_features, TILE_K // it.segments),
        "scaleBits": it.scale_bits,
        "segments": it.segments,
        "stages": layout.stages,
        "rangeTiles": range_tiles,
        "longRanges": long_ranges,
        "ranges": layout.ranges,
        "tokenTiles": layout.token_tiles,
        "tokenBand": TOKEN_BAND,
        "wholeItems": layout.whole_items,
        "splits": layout.splits,
    }
    arranged = (
        0 if it.order.for_batches else layout.token_tiles * layout.shape.tokens * it.k_tiles * TILE_K * dtype.itemsize
    )
    partials = _aligned(arranged)
    return _Plan(
        gemm_unit(it, dtype, layout.shape),
        layout,
        args,
        partials=partials,
        work_bytes=partials + layout.partial_floats * FLOAT_BYTES,
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
