"""What may follow a product without a kernel of its own: an activation function, then a residual addition."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS

_NO_ACTIVATION = -1  # as kernels/shared/epilogue.cuh numbers it


@dataclass(frozen=True, eq=False)
class Finish:
    """residual + activation(y) for a product y [..., N].

    activation: of ACTIVATIONS, or None. residual: of y's shape and type, or None.
    """

    activation: str | None = None
    residual: Tensor | None = None

    @property
    def number(self) -> int:
        """The activation as kernels/shared/epilogue.cuh numbers it."""
        return _NO_ACTIVATION if self.activation is None else ACTIVATIONS[self.activation].number

    def addend(self, y: Tensor) -> Tensor | None:
        """The residual as the kernels read it beside y [M, N]. Raises KernelError where shape or type differ."""
        if self.residual is None:
            return None
        if self.residual.numel() != y.numel() or self.residual.dtype != y.dtype:
            raise KernelError(
                f"a residual of {tuple(self.residual.shape)} {self.residual.dtype} cannot be added to a product of "
                f"{tuple(y.shape)} {y.dtype}"
            )
        return self.residual.contiguous()


AS_IT_IS = Finish()
"""Nothing follows."""


def finished(y: Tensor, finish: Finish) -> Tensor:
    """``finish`` of y by torch, every step rounding to y's type: what the kernels do to the bit, up to tanh and exp."""
    if finish.activation is not None:
        y = ACTIVATIONS[finish.activation].apply(y)
    return y if finish.residual is None else finish.residual.view_as(y) + y
