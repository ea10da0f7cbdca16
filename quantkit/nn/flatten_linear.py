"""y = x W^T + bias for a weight in the ``flatten`` format: integer codes on both sides, int32 sums."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Tensors
from quantkit.formats.flatten import FlattenSpec
from quantkit.ops.flatten import flatten_quantize, int8_gemm


def forward(spec: FlattenSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype."""
    act_codes = flatten_quantize(
        x,
        tensors["source_channel"],
        tensors["source_segment"],
        tensors["act_scale"],
        tensors.get("smooth_scale"),
        spec.act_bits,
    )
    return int8_gemm(act_codes, tensors["codes"], tensors["act_scale"], tensors["weight_scale"], bias, x.dtype)
