"""y = x W^T + bias for a weight in the ``bipolar`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import group_width
from quantkit.formats.bipolar import PER_TOKEN, BipolarSpec
from quantkit.formats.planes import packed_width
from quantkit.ops.bipolar.layout import untile_scales, untile_weight
from quantkit.ops.bipolar.op import bipolar_linear, bipolar_prepared_linear
from quantkit.ops.bipolar.weight import takes_tiles, tiled_weight


def forward(spec: BipolarSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    planes, scales, clip = tensors["bit_planes"], tensors["scales"], tensors.get("act_clip")
    coding = spec.act_bits, spec.group_size, *_coding(spec)
    return bipolar_linear(x, planes, scales, clip, bias, *coding, tensors.get("scale_factors"))


def prepare(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Tile order and row sums for the bipolar kernels; what they do not take stays as it is."""
    if not takes_tiles(spec.act_bits, spec.group_size, shape[1], coded=spec.coded):
        return dict(tensors)
    stored = tensors["bit_planes"], tensors["scales"], tensors.get("scale_factors")
    weight = tiled_weight(*stored, spec.group_size, shape[1])
    made = {"tiles": weight.tiles, "row_sums": weight.row_sums, "scales": weight.scales}
    if weight.scale_tiles is not None:
        made["scale_tiles"] = weight.scale_tiles
    return {**made, "act_clip": tensors["act_clip"]}


def restore(spec: BipolarSpec, tensors: Tensors, shape: Shape) -> dict[str, Tensor]:
    """Exact inverse of prepare."""
    if "tiles" not in tensors:
        return dict(tensors)
    made = {
        "bit_planes": untile_weight(tensors["tiles"], shape[0], packed_width(shape[1])),
        "scales": tensors["scales"],
        "act_clip": tensors["act_clip"],
    }
    if "scale_tiles" in tensors:
        width = group_width(spec.group_size, shape[1])
        made["scales"] = untile_scales(tensors["scale_tiles"], shape[0], width, shape[1])
        made["scale_factors"] = tensors["scales"]
    return made


def prepared_forward(spec: BipolarSpec, tensors: Tensors, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
    """As forward, on prepared tensors."""
    if "tiles" not in tensors:
        return forward(spec, tensors, x, bias)
    stored = tensors["tiles"], tensors["row_sums"], tensors["scales"]
    coding = spec.act_bits, *_coding(spec)
    return bipolar_prepared_linear(x, *stored, tensors["act_clip"], bias, *coding, tensors.get("scale_tiles"))


def _coding(spec: BipolarSpec) -> tuple[bool, bool, bool]:
    return spec.act_granularity == PER_TOKEN, spec.act_zero, spec.rotate_inputs
