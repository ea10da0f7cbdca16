"""The LINEARS table: how a packed weight multiplies activations, one row per format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from quantkit.formats.base import Shape, Tensors
from quantkit.nn import bcq_linear, bipolar_linear, flatten_linear, trellis_linear
from quantkit.ops.bcq.arranged import InputOrder, ProductInput
from quantkit.ops.bcq.gated import interleave_gates
from quantkit.ops.epilogue import Epilogue

Layout = Literal["latency", "few", "batch"]
"""What a weight's order in a GPU's memory is for: one token at a time, two to four, or many."""
_FEW_SEQUENCES = 4


def layout_for(sequences: int) -> Layout:
    """The order of weights with which so many sequences are decoded fastest."""
    if sequences > _FEW_SEQUENCES:
        return "batch"
    return "few" if sequences > 1 else "latency"


@dataclass(frozen=True)
class LinearRow:
    """One row of LINEARS.

    forward: (spec, canonical tensors, x [..., K], bias [N] or None) -> y [..., N] in x's dtype.
    prepare: (spec, canonical tensors on a GPU, shape) -> the same content in the order that this GPU's kernels
        read; None where the kernels read the canonical order.
    prepare_few, prepare_batch: as prepare, in the order that is faster where two to four, or more, tokens are
        multiplied at once; None where there is no such order.
    restore: the exact inverse of prepare, for saving.
    prepared_forward: (spec, prepared tensors, shape, x, bias) -> as forward.
    epilogue_forward: (spec, prepared tensors, shape, x, bias, epilogue) -> its epilogue; None where no kernel has one.
    input_order: (the same) -> the order in which epilogue_forward also takes what is like x, or None. With that.
    interleave_gates: canonical tensors of gates and ups -> the same with both in turn; None where no kernel ends with
        silu(gate) * up.
    gated_forward: (spec, prepared tensors of such, shape, x) -> silu(gate) * up [..., N / 2]. With that.
    """

    forward: Callable[[Any, Tensors, Tensor, Tensor | None], Tensor]
    prepare: Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None = None
    prepare_few: Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None = None
    prepare_batch: Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None = None
    restore: Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None = None
    prepared_forward: Callable[[Any, Tensors, Shape, Tensor, Tensor | None], Tensor] | None = None
    epilogue_forward: Callable[[Any, Tensors, Shape, ProductInput, Tensor | None, Epilogue], Tensor] | None = None
    input_order: Callable[[Any, Tensors, Shape, Tensor, Tensor | None, Epilogue], InputOrder | None] | None = None
    interleave_gates: Callable[[Tensors], dict[str, Tensor]] | None = None
    gated_forward: Callable[[Any, Tensors, Shape, Tensor], Tensor] | None = None

    def preparation(self, layout: Layout) -> Callable[[Any, Tensors, Shape], dict[str, Tensor]] | None:
        """``prepare``, or ``prepare_few`` or ``prepare_batch`` where that is asked for and there is one."""
        return {"latency": None, "few": self.prepare_few, "batch": self.prepare_batch}[layout] or self.prepare


LINEARS: dict[str, LinearRow] = {
    "bcq": LinearRow(
        forward=bcq_linear.forward,
        prepare=bcq_linear.prepare,
        prepare_few=bcq_linear.prepare_few,
        prepare_batch=bcq_linear.prepare_batch,
        restore=bcq_linear.restore,
        prepared_forward=bcq_linear.prepared_forward,
        epilogue_forward=bcq_linear.epilogue_forward,
        input_order=bcq_linear.input_order,
        interleave_gates=interleave_gates,
        gated_forward=bcq_linear.gated_forward,
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
    "trellis": LinearRow(
        forward=trellis_linear.forward,
        prepare=trellis_linear.prepare,
        restore=trellis_linear.restore,
        prepared_forward=trellis_linear.prepared_forward,
    ),
}
