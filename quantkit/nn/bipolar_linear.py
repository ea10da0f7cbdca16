"""y = x W^T + bias for a weight in the ``bipolar`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import group_width
from quantkit.formats.bipolar import FLOAT_ACT_BITS, PER_TOKEN, BipolarSpec
from quantkit.formats.planes import packed_width
from quantkit.ops.bipolar.grouped import grouped_weight, takes_groups
from quantkit.ops.bipolar.layout import plane_row_sums, tile_weight, untile_scales, untile_weight
from quantkit.ops.bipolar.op import bipolar_grouped_linear, bipolar_linear, bipolar_prepared_linear


def forward(spec: BipolarSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    planes, scales, clip = tensors["bit_planes"], tensors["scales"], tensors.get("act_clip")
    return bipolar_linear(x, planes, scales, clip, bias, spec.act_bits, spec.group_size, *_coding(spec))


def prepare(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Tile order and row sums for the bipolar kernels; what they do not take stays as it is."""
    planes, scales = tensors["bit_planes"], tensors["scales"]
    if takes_groups(spec, shape[1], planes.device):
        weight = grouped_weight(planes, scales, spec.group_size, shape[1])
        made = {"tiles": weight.tiles, "scale_tiles": weight.scale_tiles, "offsets": weight.offsets}
    elif _runs_on_tiles(spec, shape):
        made = {"tiles": tile_weight(planes), "row_sums": plane_row_sums(planes, shape[1]), "scales": scales}
    else:
        return dict(tensors)
    return {**made, "act_clip": tensors["act_clip"]}


def restore(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Exact inverse of prepare."""
    if "tiles" not in tensors:
        return dict(tensors)
    bit_planes = untile_weight(tensors["tiles"], shape[0], packed_width(shape[1]))
    if "scale_tiles" in tensors:
        scales = untile_scales(tensors["scale_tiles"], shape[0], spec.group_size, shape[1])
    else:
        scales = tensors["scales"]
    return {"bit_planes": bit_planes, "scales": scales, "act_clip": tensors["act_clip"]}


def prepared_forward(spec: BipolarSpec, tensors: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As forward, on prepared tensors."""
    if "tiles" not in tensors:
        return forward(spec, tensors, x, bias)
    rest = tensors["act_clip"], bias, spec.act_bits, *_coding(spec)
    if "scale_tiles" in tensors:
        return bipolar_grouped_linear(x, tensors["tiles"], tensors["scale_tiles"], tensors["offsets"], *rest)
    return bipolar_prepared_linear(x, tensors["tiles"], tensors["row_sums"], tensors["scales"], *rest)


def _coding(spec: BipolarSpec) -> tuple[bool, bool, bool]:
    """The last arguments of every bipolar op."""
    return spec.act_granularity == PER_TOKEN, spec.act_zero, spec.rotate_inputs


def _runs_on_tiles(spec: BipolarSpec, shape: Shape) -> bool:
    return spec.act_bits != FLOAT_ACT_BITS and group_width(spec.group_size, shape[1]) == shape[1]
