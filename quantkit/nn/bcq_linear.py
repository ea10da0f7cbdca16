"""y = x W^T + bias for a weight in the ``bcq`` format."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.base import Tensors
from quantkit.formats.bcq import BcqSpec
from quantkit.ops.bcq import bcq_linear


def forward(spec: BcqSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype; the CPU runs the reference twin."""
    return bcq_linear(x, tensors["signs"], tensors["scales"], tensors.get("offset"), bias, spec.group_size)
