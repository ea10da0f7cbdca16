"""Rows that the kernel before a product writes in the order in which the product reads them.

The fused product of sign planes reads x in an order of its own (kernels/bcq/arrange.cuh). A norm or a gated activation
that writes x in that order saves the launch that puts it there, and x passes through memory once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.cuda.architectures import Architecture
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.launch import DTYPE_CODES, FixedLaunches, Launch
from quantkit.cuda.parameters import Argument, Pointer
from quantkit.cuda.source import KernelSource
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bcq.gemm import arrange_grid, gemm_kernel
from quantkit.ops.bcq.instances import ARRANGE_THREADS, CONSTANTS
from quantkit.ops.decode.instances import NORM_THREADS, NORM_VECTORS, norm_vectors
from quantkit.ops.decode.layout import DTYPE_CODES_TAKEN, VECTOR_VALUES, row_stride

_SOURCE = KernelSource(
    "bcq/arrange_norm.cu", {**CONSTANTS, "VECTOR_VALUES": VECTOR_VALUES, "NORM_THREADS": NORM_THREADS}
)
_fixed = FixedLaunches()


@dataclass(frozen=True)
class InputOrder:
    """How a product reads x: of a weight of so many planes, in tiles of so many tokens.

    work_bytes: of the memory that the product works in, which begins with x in this order.
    """

    weight_bits: int
    tile_tokens: int
    work_bytes: int


@dataclass(frozen=True, eq=False)
class ArrangedInput:
    """x [..., K] in a product's order, at the beginning of the memory that the product works in.

    like: a tensor of x's shape, type and device. Its elements are other ones.
    """

    like: Tensor
    order: InputOrder
    memory: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of x."""
        return self.like.shape


ProductInput = Tensor | ArrangedInput
"""x as it is, or in a product's order."""


def arranged_norm(
    x: Tensor, parameters: tuple[Tensor, Tensor | None], epsilon: float, order: InputOrder, *, centered: bool
) -> ArrangedInput:
    """``ops.decode.op.norm`` of x [..., K], the same values in the order of a product. parameters: weight and bias."""
    x, memory = x.contiguous(), _memory(order, x.device)
    weight, bias = parameters
    key = ("norm", x.dtype, x.numel(), x.shape[-1], epsilon, centered, bias is None, order)
    pointers: dict[str, Pointer | None] = {"x": x, "weight": weight, "bias": bias, "arranged": memory}
    _fixed.run(key, lambda: _norm_launch(x, pointers, epsilon, order, centered=centered), x.device, pointers)
    return ArrangedInput(x, order, memory)


def arranged_gated(gate: Tensor, up: Tensor, activation: str, order: InputOrder) -> ArrangedInput:
    """``ops.decode.op.gated`` of gate and up [..., K], the same values in the order of a product."""
    memory = _memory(order, gate.device)
    key = ("gated", gate.dtype, gate.shape, gate.stride(), up.stride(), activation, order)
    pointers: dict[str, Pointer | None] = {"gate": gate, "up": up, "arranged": memory}
    _fixed.run(key, lambda: _gated_launch(gate, up, memory, activation, order), gate.device, pointers)
    return ArrangedInput(gate, order, memory)


def _memory(order: InputOrder, device: torch.device) -> Tensor:
    return torch.empty(order.work_bytes, dtype=torch.uint8, device=device)


def _norm_launch(
    x: Tensor, pointers: dict[str, Pointer | None], epsilon: float, order: InputOrder, *, centered: bool
) -> Launch:
    in_features = x.shape[-1]
    return Launch(
        _norm_unit(centered, DTYPE_CODES[x.dtype], norm_vectors(in_features)),
        x.device,
        grid=(x.numel() // in_features,),
        block=NORM_THREADS,
        args={**pointers, "K": in_features, "epsilon": epsilon, **_order_args(order)},
        overlap=True,
    )


def _gated_launch(gate: Tensor, up: Tensor, memory: Tensor, activation: str, order: InputOrder) -> Launch:
    in_features = gate.shape[-1]
    tokens = gate.numel() // in_features
    return Launch(
        _gated_unit(DTYPE_CODES[gate.dtype]),
        gate.device,
        grid=arrange_grid(tokens, in_features),
        block=ARRANGE_THREADS,
        args={
            "gate": gate,
            "up": up,
            "arranged": memory,
            "M": tokens,
            "K": in_features,
            "gateStride": row_stride(gate) or 0,
            "upStride": row_stride(up) or 0,
            "activation": ACTIVATIONS[activation].number,
            **_order_args(order),
        },
        overlap=True,
    )


def _order_args(order: InputOrder) -> dict[str, Argument]:
    return {"tileTokens": order.tile_tokens, "bits": order.weight_bits}


def _norm_unit(centered: bool, dtype: int, vectors: int) -> CompileUnit:
    return CompileUnit(_SOURCE, "bcqArrangeNorm", (centered, dtype, vectors))


def _gated_unit(dtype: int) -> CompileUnit:
    return CompileUnit(_SOURCE, "bcqArrangeGated", (dtype,))


def arranged_units(row: Architecture) -> Iterator[CompileUnit]:
    """Every instance, for GPUs that have a fused product."""
    if gemm_kernel(row) is None:
        return
    for dtype in DTYPE_CODES_TAKEN:
        for centered in (True, False):
            yield from (_norm_unit(centered, dtype, vectors) for vectors in NORM_VECTORS)
        yield _gated_unit(dtype)
