"""y = x W^T + bias for a weight in the ``bcq`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES
from quantkit.cuda.device import gpu_of
from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import BcqSpec, BcqTensors
from quantkit.nn.inputs import kernel_input
from quantkit.ops.bcq.arranged import ArrangedInput, InputOrder, ProductInput
from quantkit.ops.bcq.autotune import ensure_measured
from quantkit.ops.bcq.bound import arranged_product
from quantkit.ops.bcq.candidates import multiplies_batches
from quantkit.ops.bcq.gated import bcq_gated
from quantkit.ops.bcq.layout import BcqTiles, is_grid, tile, untile
from quantkit.ops.bcq.op import (
    BcqLinearPrepared,
    bcq_input_order,
    bcq_linear,
    bcq_linear_prepared,
    bcq_linear_with_epilogue,
)
from quantkit.ops.bcq.order import Order
from quantkit.ops.epilogue import Epilogue

_TILES = {Order.PLANES: "tiles", Order.CODES: "code_tiles", Order.GRID: "grid_tiles"}
"""The name of the tiles by their order."""
_PLANES_FOR_FEW = 4  # of a grid, at least; one of two has less to read as signs, and is slower for up to four tokens


def forward(spec: BcqSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    stored = BcqTensors.of(tensors)
    return bcq_linear(
        kernel_input(spec, x), stored.signs, stored.scales, stored.offset, bias, spec.group_size, stored.scale_factors
    )


def prepare(spec: BcqSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The kernels' tile order; on a GPU, a shape class seen for the first time is measured as well."""
    return _prepared(tile(BcqTensors.of(tensors), shape[1], spec.group_size))


def prepare_few(spec: BcqSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """As ``prepare_batch`` for numbers, which are multiplied by four tokens as fast as by one; else as ``prepare``."""
    stored = BcqTensors.of(tensors)
    numbers = stored.signs.shape[0] >= _PLANES_FOR_FEW and is_grid(stored)
    return (prepare_batch if numbers else prepare)(spec, tensors, shape)


def prepare_batch(spec: BcqSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """As ``prepare``, in an order for batches; that for latency where the GPU has no product for such."""
    stored = BcqTensors.of(tensors)
    device, weight_bits = stored.signs.device, stored.signs.shape[0]
    row = gpu_of(device).architecture if device.type == "cuda" else ARCHITECTURES[min(ARCHITECTURES)]
    order = Order.PLANES
    if multiplies_batches(row, weight_bits, spec.group_size, shape[1]):
        order = Order.GRID if is_grid(stored) else Order.CODES
    return _prepared(tile(stored, shape[1], spec.group_size, order=order))


def _prepared(weight: BcqTiles) -> dict[str, Tensor]:
    if weight.tiles.is_cuda:
        ensure_measured(weight)
    prepared = {_TILES[weight.order]: weight.tiles, "scale_tiles": weight.scale_tiles}
    return prepared if weight.factor_tiles is None else {**prepared, "factor_tiles": weight.factor_tiles}


def restore(spec: BcqSpec, prepared: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The canonical tensors that ``prepare`` was given, bit for bit."""
    return untile(prepared_weight(spec, prepared, shape)).named()


def prepared_weight(spec: BcqSpec, prepared: Tensors, shape: Shape) -> BcqTiles:
    """What ``prepare`` or ``prepare_batch`` gave."""
    order = _order(prepared)
    tiles, factor_tiles = prepared[_TILES[order]], prepared.get("factor_tiles")
    return BcqTiles(tiles, prepared["scale_tiles"], factor_tiles, *shape, spec.group_size, order)


def _order(prepared: Tensors) -> Order:
    return next(order for order, name in _TILES.items() if name in prepared)


def prepared_forward(spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As ``forward``, from the tile order; QuantizedLinear synchronizes after every change of the stored tensors."""
    return bcq_linear_prepared(*_operands(spec, prepared, shape, x, bias))


def epilogue_forward(
    spec: BcqSpec, prepared: Tensors, shape: Shape, x: ProductInput, bias: Tensor | None, epilogue: Epilogue
) -> Tensor:
    """The epilogue of ``prepared_forward``, in the same kernel. x: rows as they are, or in their ``input_order``."""
    if isinstance(x, ArrangedInput):
        return arranged_product(_operands(spec, prepared, shape, x.like, bias), x, epilogue)
    return bcq_linear_with_epilogue(_operands(spec, prepared, shape, x, bias), epilogue)


def gated_forward(spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor) -> Tensor:
    """silu(gate) * up [..., N / 2] for a prepared weight of ``interleave_gates`` [N, K]."""
    return bcq_gated(*_operands(spec, prepared, shape, x, None))


def input_order(
    spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None, epilogue: Epilogue
) -> InputOrder | None:
    """The order in which ``epilogue_forward`` also takes what is like x, or None."""
    if spec.rotate_inputs:
        return None
    return bcq_input_order(_operands(spec, prepared, shape, x, bias), epilogue)


def _operands(spec: BcqSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> BcqLinearPrepared:
    order = _order(prepared)
    return BcqLinearPrepared(
        kernel_input(spec, x),
        prepared[_TILES[order]],
        prepared["scale_tiles"],
        bias,
        shape[0],
        spec.group_size,
        weights_ready=True,
        factor_tiles=prepared.get("factor_tiles"),
        order=order.value,
    )
