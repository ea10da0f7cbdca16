"""y = x W^T + bias for a weight in the ``bipolar`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Tensors
from quantkit.formats.bipolar import PER_TOKEN, BipolarSpec
from quantkit.ops.bipolar import bipolar_linear


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
    )
