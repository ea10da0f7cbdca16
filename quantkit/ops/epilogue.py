"""The epilogue of a product: an activation function, then a residual addition, without a kernel of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS

NO_ACTIVATION = -1
"""Where kernels take the number of an activation function."""


@dataclass(frozen=True, eq=False)
class Epilogue:
    """residual + activation(y) for a product y [..., N].

    activation: of ACTIVATIONS, or None. residual: of y's shape and type, or None.
    """

    activation: str | None = None
    residual: Tensor | None = None

    @property
    def number(self) -> int:
        """The activation as kernels take it."""
        return NO_ACTIVATION if self.activation is None else ACTIVATIONS[self.activation].number

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


NO_EPILOGUE = Epilogue()
"""y as it is."""


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue of y by torch, every step rounding to y's type: the kernels' bits, up to tanh and exp."""
    if epilogue.activation is not None:
        y = ACTIVATIONS[epilogue.activation].apply(y)
    return y if epilogue.residual is None else epilogue.residual.view_as(y) + y
