"""The ops ``quantkit::trellis_linear`` (canonical tensors) and ``quantkit::trellis_linear_prepared`` (tile order).

On the CPU both run the reference twin. On a GPU few tokens take the product of binary coding with the planes, q N rows
of one plane, and a filter behind it; many take the expanded weight and cuBLAS. fp32 activations always take an fp32
weight, so nothing is rounded. The sums of the planes are rounded to x's type between the two kernels, which adds about
as much as the rounding of y itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as pairs
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.formats.bcq import ROW_WISE
from quantkit.formats.planes import pack_bits
from quantkit.formats.trellis import BLOCK_ROWS, TrellisTensors, dequantize_stored
from quantkit.ops.bcq.autotune import choose
from quantkit.ops.bcq.instances import TILE_K
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.op import bcq_linear_prepared
from quantkit.ops.registry import define_op
from quantkit.ops.trellis.instances import (
    DEQUANTIZE_THREADS,
    DEQUANTIZE_TILES,
    FILTER_ROWS,
    FILTER_THREADS,
    dequantize_bytes,
    dequantize_unit,
    filter_unit,
)
from quantkit.ops.trellis.layout import TrellisTiles, prepare_planes, restore_planes

MOST_TOKENS = {1: 512, 2: 256, 3: 128, 4: 128, 5: 96, 6: 80}
"""By the number of planes, the tokens up to which they are multiplied: their product takes q times the operations of an
expanded weight's, but no time to expand it. Tiles have 128 tokens, so another tile costs as much as the first.
Measured for 2, 3 and 4 planes (kernels/log.md)."""


class TrellisLinear(NamedTuple):
    """y [..., N] = x [..., K] W^T + bias of canonical tensors (quantkit.formats.trellis)."""

    x: Tensor
    signs: Tensor
    scales: Tensor
    filter: Tensor
    bias: Tensor | None

    @property
    def stored(self) -> TrellisTensors:
        """The weight."""
        return TrellisTensors(self.signs, self.scales, self.filter)


class TrellisLinearPrepared(NamedTuple):
    """TrellisLinear of a prepared weight (layout.py).

    weights_ready: no kernel still queued writes the weight.
    """

    x: Tensor
    tiles: Tensor
    scale_tiles: Tensor
    scales: Tensor
    filter: Tensor
    bias: Tensor | None
    weights_ready: bool = False

    @property
    def weight(self) -> TrellisTiles:
        """The weight."""
        rows, columns = len(self.filter) * len(self.scales), self.x.shape[-1]
        planes = BcqTiles(self.tiles, self.scale_tiles, None, rows, columns, ROW_WISE)
        return TrellisTiles(planes, self.scales, self.filter)


def trellis_linear_reference(x: Tensor, stored: TrellisTensors, bias: Tensor | None) -> Tensor:
    """y = x W^T + bias, W rebuilt in fp32 and rounded to x's dtype."""
    weight = dequantize_stored(stored, x.shape[-1]).to(x.dtype)
    return linear(x, weight, None if bias is None else bias.to(x.dtype))


def dequantize_planes(weight: TrellisTiles, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in fp16, bf16 or fp32."""
    (bits, taps), rows, columns = weight.filter.shape, len(weight.scales), weight.planes.in_features
    dequantized = torch.empty(rows, columns, dtype=dtype, device=weight.scales.device)
    Launch(
        dequantize_unit(dtype, bits),
        weight.scales.device,
        grid=(-(-columns // (DEQUANTIZE_TILES * TILE_K)), -(-rows // BLOCK_ROWS)),
        block=DEQUANTIZE_THREADS,
        shared_mem=dequantize_bytes(bits, taps),
        args={
            "tiles": weight.planes.tiles,
            "filter": weight.filter,
            "scales": weight.scales,
            "weight": dequantized,
            "N": rows,
            "K": columns,
            "taps": taps,
        },
    ).run()
    return dequantized


def filter_sums(sums: Tensor, weight: TrellisTiles, bias: Tensor | None, *, weights_ready: bool) -> Tensor:
    """y [M, N] of the plane product's sums [M, q N], fp16 or bf16; bias in their type."""
    (bits, taps), rows = weight.filter.shape, len(weight.scales)
    y = sums.new_empty(len(sums), rows)
    Launch(
        filter_unit(sums.dtype, bits),
        sums.device,
        grid=(-(-rows // FILTER_ROWS), len(sums)),
        block=FILTER_THREADS,
        args={
            "z": sums,
            "filter": weight.filter,
            "scales": weight.scales,
            "bias": bias,
            "y": y,
            "N": rows,
            "taps": taps,
            "unit": 1 / weight.unit,
            "ready": int(weights_ready),
        },
        overlap=True,
    ).run()
    return y


def multiplies_planes(tokens: int, dtype: torch.dtype, weight: TrellisTiles) -> bool:
    """Whether so many tokens take the product with the planes, or the expanded weight."""
    return tokens <= MOST_TOKENS[len(weight.filter)] and dtype != torch.float32


def implementation(x: Tensor, weight: TrellisTiles) -> str:
    """The kernel that multiplies x [M, K] with the planes, or ``trellisDequantize``."""
    if not multiplies_planes(len(x), x.dtype, weight):
        return "trellisDequantize"
    planes = weight.planes
    return choose(x, 1, planes.out_features, ROW_WISE, planes.scale_bits)


def _product(x: Tensor, weight: TrellisTiles, bias: Tensor | None, *, weights_ready: bool) -> Tensor:
    rows, planes = len(weight.scales), weight.planes
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    added = None if bias is None else bias.to(x.dtype)
    if not len(flat):
        return x.new_empty(*x.shape[:-1], rows)
    if not multiplies_planes(len(flat), x.dtype, weight):
        return linear(x, dequantize_planes(weight, x.dtype), added)
    stored = planes.tiles, planes.scale_tiles, None, planes.out_features, ROW_WISE
    sums = bcq_linear_prepared(flat, *stored, weights_ready=weights_ready)
    ready = weights_ready and added is bias  # a kernel still queued writes a bias of another type
    return filter_sums(sums, weight, added, weights_ready=ready).view(*x.shape[:-1], rows)


def _linear_cuda(op: TrellisLinear) -> Tensor:
    planes = prepare_planes(op.stored, op.x.shape[-1])
    return _product(op.x, TrellisTiles(planes, op.scales, op.filter), op.bias, weights_ready=False)


_SAMPLE_SHAPES = ((48, 100), (64, 328), (208, 520), (576, 1000))  # N, K: short rings, odd tiles
_SAMPLE_FILTERS = ((2, 4), (3, 5), (4, 4), (1, 8), (5, 3), (6, 1))


def _linear_samples() -> Iterator[TrellisLinear]:
    """Every number of planes, few tokens and many, in every type."""
    for number, ((n, k), tokens) in enumerate(pairs(_SAMPLE_SHAPES, (1, 3, 20, MOST_TOKENS[1] + 1))):
        bits, taps = _SAMPLE_FILTERS[number % len(_SAMPLE_FILTERS)]
        signs, scales = pack_bits(torch.randint(0, 2, (bits, n, k))), (torch.rand(n, 1) * 0.02).half()
        dtype = tuple(DTYPE_CODES)[number % len(DTYPE_CODES)]
        bias = torch.randn(n).half() if number % 2 else None
        yield TrellisLinear(torch.randn(tokens, k).to(dtype), signs, scales, torch.randn(bits, taps) * 0.3, bias)


def _prepared_samples() -> Iterator[TrellisLinearPrepared]:
    for op in _linear_samples():
        planes = prepare_planes(op.stored, op.x.shape[-1])
        yield TrellisLinearPrepared(op.x, planes.tiles, planes.scale_tiles, op.scales, op.filter, op.bias)


trellis_linear = define_op(
    "trellis_linear",
    TrellisLinear,
    reference=lambda op: trellis_linear_reference(op.x, op.stored, op.bias),
    cuda=_linear_cuda,
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.signs.shape[1]),
    samples=_linear_samples,
)
trellis_linear_prepared = define_op(
    "trellis_linear_prepared",
    TrellisLinearPrepared,
    reference=lambda op: trellis_linear_reference(op.x, restore_planes(op.weight), op.bias),
    cuda=lambda op: _product(op.x, op.weight, op.bias, weights_ready=op.weights_ready),
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.scales.shape[0]),
    samples=_prepared_samples,
)
