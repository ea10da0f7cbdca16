"""The op ``quantkit::bcq_linear``: schema, reference twin, fake."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantkit.formats.bcq import dequantize_planes
from quantkit.ops.library import LIBRARY

LIBRARY.define(
    "bcq_linear(Tensor x, Tensor signs, Tensor scales, Tensor? offset, Tensor? bias, int group_size) -> Tensor"
)


def bcq_linear_reference(
    x: Tensor, signs: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    """y = x W^T + bias, W rebuilt from its planes in fp32 and rounded to x's dtype (nuQmm section 5.1)."""
    weight = dequantize_planes(signs, scales, offset, x.shape[-1], group_size)
    return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _fake(
    x: Tensor, signs: Tensor, scales: Tensor, offset: Tensor | None, bias: Tensor | None, group_size: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], signs.shape[1])


LIBRARY.impl("bcq_linear", bcq_linear_reference, "CPU")
torch.library.register_fake("quantkit::bcq_linear", _fake, lib=LIBRARY)

bcq_linear = torch.ops.quantkit.bcq_linear.default
