"""y = x W^T + bias for a weight in the ``trellis`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import ROW_WISE
from quantkit.formats.trellis import TrellisSpec, TrellisTensors
from quantkit.nn.inputs import kernel_input
from quantkit.ops.bcq.autotune import ensure_measured
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.trellis.layout import TrellisTiles, prepare_planes, restore_planes
from quantkit.ops.trellis.op import trellis_linear, trellis_linear_prepared


def forward(spec: TrellisSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    stored = TrellisTensors.of(tensors)
    return trellis_linear(kernel_input(spec, x), stored.signs, stored.scales, stored.filter, bias)


def prepare(spec: TrellisSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The kernels' tile order; on a GPU, a shape class seen for the first time is measured as well."""
    stored = TrellisTensors.of(tensors)
    planes = prepare_planes(stored, shape[1])
    if planes.tiles.is_cuda:
        ensure_measured(planes)
    tiles = {"tiles": planes.tiles, "scale_tiles": planes.scale_tiles}
    return {**tiles, "scales": stored.scales, "filter": stored.filter}


def restore(spec: TrellisSpec, prepared: Tensors, shape: Shape) -> dict[str, Tensor]:
    """The canonical tensors that ``prepare`` was given, bit for bit."""
    return restore_planes(prepared_weight(spec, prepared, shape)).named()


def prepared_weight(spec: TrellisSpec, prepared: Tensors, shape: Shape) -> TrellisTiles:
    """What ``prepare`` gave."""
    features = spec.weight_bits * shape[0]
    planes = BcqTiles(prepared["tiles"], prepared["scale_tiles"], None, features, shape[1], ROW_WISE)
    return TrellisTiles(planes, prepared["scales"], prepared["filter"])


def prepared_forward(spec: TrellisSpec, prepared: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As ``forward``, from the tile order; QuantizedLinear synchronizes after every change of the stored tensors."""
    return trellis_linear_prepared(
        kernel_input(spec, x),
        prepared["tiles"],
        prepared["scale_tiles"],
        prepared["scales"],
        prepared["filter"],
        bias,
        weights_ready=True,
    )
