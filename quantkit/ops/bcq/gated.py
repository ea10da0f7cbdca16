"""The op ``quantkit::bcq_gated``: the product of a feed-forward network's gates and ups with silu(gate) * up.

Both are one weight, whose rows are gates and ups in turn: a lane of the tensor cores then has the up of its gate, and
half as much is written. The op takes what bcq_linear_prepared takes, of a weight of ``interleave_gates``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quantkit.formats.base import Tensors
from quantkit.formats.bcq import ROW_WISE
from quantkit.ops.bcq.layout import tile
from quantkit.ops.bcq.op import (
    BcqLinearPrepared,
    batch_samples,
    bcq_linear_with_epilogue,
    linear_samples,
    with_epilogue_cuda,
)
from quantkit.ops.epilogue import GATED_ROWS, GATED_SILU
from quantkit.ops.registry import define_op


def can_interleave(out_features: int) -> bool:
    """Whether so many gates and as many ups can stand in turn."""
    return out_features % GATED_ROWS == 0


def interleave_gates(tensors: Tensors) -> dict[str, Tensor]:
    """Canonical bcq tensors of N / 2 gates and then as many ups -> with both in turn, GATED_ROWS of each."""
    scales = tensors["scales"]
    order = torch.arange(scales.shape[1], device=scales.device).view(2, -1, GATED_ROWS).transpose(0, 1).flatten()
    return {name: tensor.index_select(-2, order) for name, tensor in tensors.items()}


# N, K, group size, as those of bcq_linear; N is whole tiles
_SAMPLE_SHAPES = ((48, 328, 64), (272, 1000, 128), (64, 520, 40), (32, 100, ROW_WISE), (64, 24700, 128))


def _samples() -> Iterator[BcqLinearPrepared]:
    for op in linear_samples(_SAMPLE_SHAPES):
        orders = [tile(op.stored, op.x.shape[-1], op.group_size)]
        if op.group_size == ROW_WISE or op.group_size % 32 == 0:
            orders += batch_samples(op)
        for weight in orders:
            stored = weight.tiles, weight.scale_tiles, op.bias, weight.out_features, op.group_size
            yield BcqLinearPrepared(op.x, *stored, factor_tiles=weight.factor_tiles, order=weight.order.value)


bcq_gated = define_op(
    "bcq_gated",
    BcqLinearPrepared,
    reference=lambda op: bcq_linear_with_epilogue(op, GATED_SILU),
    cuda=lambda op: with_epilogue_cuda(op, GATED_SILU),
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.out_features // 2),
    samples=_samples,
)
