"""The LINEARS table: how a packed weight multiplies activations, one row per format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.nn import bcq_linear, bipolar_linear, flatten_linear
from quantkit.ops.epilogue import Epilogue


@dataclass(frozen=True)
class LinearRow:
    """One row of LINEARS.

    forward: (spec, canonical tensors, x [..., K], bias [N] or None) -> y [..., N] in x's dtype.
    prepare: (spec, canonical tensors on a GPU, shape) -> the same content in the order that this GPU's kernels
        read; None where the kernels read the canonical order.
    restore: the exact inverse of prepare, for saving.
    prepared_forward: (spec, prepared tensors, shape, x, bias) -> as forward.
    epilogue_forward: (spec, prepared tensors, shape, x, bias, epilogue) -> its epilogue; None where no kernel has one.
    """

    forward: Callable[[Any, Tensors, Tensor, Tensor | None], Tensor]
    prepare: Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None = None
    restore: Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None = None
    prepared_forward: Callable[[Any, Tensors, Shape, Tensor, Tensor | None], Tensor] | None = None
    epilogue_forward: Callable[[Any, Tensors, Shape, Tensor, Tensor | None, Epilogue], Tensor] | None = None


LINEARS: dict[str, LinearRow] = {
    "bcq": LinearRow(
        forward=bcq_linear.forward,
        prepare=bcq_linear.prepare,
        restore=bcq_linear.restore,
        prepared_forward=bcq_linear.prepared_forward,
        epilogue_forward=bcq_linear.epilogue_forward,
    ),
    "bipolar": LinearRow(
        forward=bipolar_linear.forward,
        prepare=bipolar_linear.prepare,
        restore=bipolar_linear.restore,
        prepared_forward=bipolar_linear.prepared_forward,
    ),
    "flatten": LinearRow(
        forward=flatten_linear.forward,
        prepare=flatten_linear.prepare,
        restore=flatten_linear.restore,
        prepared_forward=flatten_linear.prepared_forward,
    ),
}
