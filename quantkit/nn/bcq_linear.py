"""y = x W^T + bias for a weight in the ``bcq`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import BcqSpec
from quantkit.ops.bcq import bcq_linear, bcq_linear_prepared
from quantkit.ops.bcq_choice import ensure_measured
from quantkit.ops.bcq_tiles import tile_scales, tile_signs, untile_scales, untile_signs


def forward(spec: BcqSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    return bcq_linear(x, tensors["signs"], tensors["scales"], tensors.get("offset"), bias, spec.group_size)


def prepare(spec: BcqSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The kernels' tile order; on a GPU, a shape class seen for the first time is measured as well."""
    tiles = tile_signs(tensors["signs"])
    scale_tiles = tile_scales(tensors["scales"], tensors.get("offset"), spec.group_size, shape[1])
    if tiles.is_cuda:
        ensure_measured(tiles, scale_tiles, *shape, spec.group_size)
    return {"tiles": tiles, "scale_tiles": scale_tiles}


def restore(spec: BcqSpec, prepared: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The canonical tensors that ``prepare`` was given, bit for bit."""
    rows, columns = shape
    scales, offset = untile_scales(prepared["scale_tiles"], rows, columns, spec.weight_bits, spec.group_size)
    restored = {"signs": untile_signs(prepared["tiles"], rows, columns), "scales": scales}
    return restored if offset is None else {**restored, "offset": offset}


def prepared_forward(spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As ``forward``, from the tile order; QuantizedLinear synchronizes after every change of the stored tensors."""
    return bcq_linear_prepared(
        x, prepared["tiles"], prepared["scale_tiles"], bias, shape[0], spec.group_size, settled=True
    )
