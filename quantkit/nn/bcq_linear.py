"""y = x W^T + bias for a weight in the ``bcq`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import BcqSpec, BcqTensors
from quantkit.ops.bcq.autotune import ensure_measured
from quantkit.ops.bcq.layout import BcqTiles, tile, untile
from quantkit.ops.bcq.op import bcq_linear, bcq_linear_prepared, bcq_linear_with_epilogue
from quantkit.ops.epilogue import Epilogue


def forward(spec: BcqSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    stored = BcqTensors.of(tensors)
    return bcq_linear(x, stored.signs, stored.scales, stored.offset, bias, spec.group_size, stored.scale_factors)


def prepare(spec: BcqSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The kernels' tile order; on a GPU, a shape class seen for the first time is measured as well."""
    weight = tile(BcqTensors.of(tensors), shape[1], spec.group_size)
    if weight.tiles.is_cuda:
        ensure_measured(weight)
    prepared = {"tiles": weight.tiles, "scale_tiles": weight.scale_tiles}
    return prepared if weight.factor_tiles is None else {**prepared, "factor_tiles": weight.factor_tiles}


def restore(spec: BcqSpec, prepared: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The canonical tensors that ``prepare`` was given, bit for bit."""
    return untile(_weight(spec, prepared, shape)).named()


def _weight(spec: BcqSpec, prepared: Tensors, shape: Shape) -> BcqTiles:
    tiles, scale_tiles, factor_tiles = prepared["tiles"], prepared["scale_tiles"], prepared.get("factor_tiles")
    return BcqTiles(tiles, scale_tiles, factor_tiles, *shape, spec.group_size)


def prepared_forward(spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As ``forward``, from the tile order; QuantizedLinear synchronizes after every change of the stored tensors."""
    return bcq_linear_prepared(
        x,
        prepared["tiles"],
        prepared["scale_tiles"],
        bias,
        shape[0],
        spec.group_size,
        weights_ready=True,
        factor_tiles=prepared.get("factor_tiles"),
    )


def epilogue_forward(
    spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None, epilogue: Epilogue
) -> Tensor:
    """The epilogue of ``prepared_forward``, in the same kernel."""
    return bcq_linear_with_epilogue(x, _weight(spec, prepared, shape), bias, epilogue)
