"""y = x W^T + bias for a weight in the ``bipolar`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import group_width
from quantkit.formats.bipolar import FLOAT_ACT_BITS, PER_TOKEN, BipolarSpec
from quantkit.formats.planes import packed_width
from quantkit.ops.bipolar.layout import plane_row_sums, tile_weight, untile_weight
from quantkit.ops.bipolar.op import bipolar_linear, bipolar_prepared_linear


def forward(spec: BipolarSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    return bipolar_linear(
        x,
        tensors["bit_planes"],
        tensors["scales"],
        tensors.get("act_clip"),
        bias,
        spec.act_bits,
        spec.group_size,
        spec.act_granularity == PER_TOKEN,
        spec.act_zero,
        spec.rotate_inputs,
    )


def prepare(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Tile order and row sums for the bipolar kernels; per-group and weight-only weights stay as they are."""
    if not _runs_on_tiles(spec, shape):
        return dict(tensors)
    return {
        "tiles": tile_weight(tensors["bit_planes"]),
        "row_sums": plane_row_sums(tensors["bit_planes"], shape[1]),
        "scales": tensors["scales"],
        "act_clip": tensors["act_clip"],
    }


def restore(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Exact inverse of prepare."""
    if not _runs_on_tiles(spec, shape):
        return dict(tensors)
    bit_planes = untile_weight(tensors["tiles"], shape[0], packed_width(shape[1]))
    return {"bit_planes": bit_planes, "scales": tensors["scales"], "act_clip": tensors["act_clip"]}


def prepared_forward(spec: BipolarSpec, tensors: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As forward, on prepared tensors."""
    if "tiles" not in tensors:
        return forward(spec, tensors, x, bias)
    return bipolar_prepared_linear(
        x,
        tensors["tiles"],
        tensors["row_sums"],
        tensors["scales"],
        tensors["act_clip"],
        bias,
        spec.act_bits,
        spec.act_granularity == PER_TOKEN,
        spec.act_zero,
        spec.rotate_inputs,
    )


def _runs_on_tiles(spec: BipolarSpec, shape: Shape) -> bool:
    return spec.act_bits != FLOAT_ACT_BITS and group_width(spec.group_size, shape[1]) == shape[1]
