"""Which bcq kernels can multiply which weights and activations on a GPU generation."""

from __future__ import annotations

from functools import cache

import torch

from quantkit.cuda.architectures import Architecture, Kernel
from quantkit.formats.bcq import group_count
from quantkit.ops.bcq.gemm import FUSED, gemm_fits
from quantkit.ops.bcq.instances import SOURCES, segment_width
from quantkit.ops.bcq.order import Order

_WORD = 32
OF_PLANES = tuple(kernel for kernel in SOURCES if kernel != Kernel.BCQ_LEVEL_GEMV)
"""Kernels that read the order for latency."""
GATING = (Kernel.BCQ_LEVEL_GEMV, *FUSED)
"""Kernels whose product may end with silu(gate) * up."""
_OF_BATCHES = (*GATING, Kernel.BCQ_DEQUANTIZE)  # kernels that read those for batches
_GEMV_TYPES = (torch.float16, torch.bfloat16)


def binary_segment(group_size: int, in_features: int) -> int | None:
    """Elements of x per activation scale of the tensor-core GEMVs, or None where the group size rules them out."""
    if group_count(group_size, in_features) == 1:
        return segment_width(0)  # one group: every segment belongs to it
    return segment_width(group_size) if group_size % _WORD == 0 else None


@cache
def candidates(
    dtype: torch.dtype,
    row: Architecture,
    *,
    weight_bits: int,
    group_size: int,
    in_features: int,
    order: Order = Order.PLANES,
) -> tuple[Kernel, ...]:
    """Kernels that a generation has for activations of ``dtype``; fp32 ones keep fp32 weights (dequantize)."""
    if dtype not in _GEMV_TYPES:
        return (Kernel.BCQ_DEQUANTIZE,)
    segment = binary_segment(group_size, in_features)
    if segment is None:
        return Kernel.BCQ_LUT_GEMV, Kernel.BCQ_DEQUANTIZE
    fused = gemm_fits(weight_bits, segment, row)
    usable = (kernel for kernel in SOURCES if kernel in row.kernels and (fused or kernel not in FUSED))
    return tuple(kernel for kernel in usable if kernel in (_OF_BATCHES if order.for_batches else OF_PLANES))


def multiplies_batches(row: Architecture, weight_bits: int, group_size: int, in_features: int) -> bool:
    """Whether a generation has a product for a weight in the orders for batches."""
    shape = {"weight_bits": weight_bits, "group_size": group_size, "in_features": in_features}
    return any(kernel in FUSED for kernel in candidates(torch.float16, row, **shape, order=Order.CODES))
