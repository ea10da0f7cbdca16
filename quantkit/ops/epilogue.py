"""The epilogue of a product, without a kernel of its own: an activation, then a residual addition; or gating."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS

NO_ACTIVATION = -1
"""Where kernels take the number of an activation function."""
GATED = 1 << 8
"""Added to the number of a gate's activation function."""
GATED_ROWS = 8
"""Gates, and as many ups behind them, that stand together in the rows of a gated product's weight."""


@dataclass(frozen=True, eq=False)
class Epilogue:
    """residual + activation(y) for a product y [..., N]; or gated, activation(gate) * up [..., N / 2].

    activation: of ACTIVATIONS, or None. residual: of y's shape and type, or None. gated: y is gates and ups in turn,
    GATED_ROWS of each; of silu and without a residual.
    """

    activation: str | None = None
    residual: Tensor | None = None
    gated: bool = False

    @property
    def number(self) -> int:
        """The activation as kernels take it."""
        number = NO_ACTIVATION if self.activation is None else ACTIVATIONS[self.activation].number
        return number + GATED if self.gated else number

    def width(self, out_features: int) -> int:
        """Of the result."""
        return out_features // 2 if self.gated else out_features

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
GATED_SILU = Epilogue("silu", gated=True)
"""silu(gate) * up."""


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue of y by torch, every step rounding to y's type: the kernels' bits, up to tanh and exp."""
    if epilogue.gated:
        gates, ups = y.unflatten(-1, (-1, 2, GATED_ROWS)).unbind(-2)
        return (ACTIVATIONS[epilogue.activation or ""].apply(gates) * ups).flatten(-2)
    if epilogue.activation is not None:
        y = ACTIVATIONS[epilogue.activation].apply(y)
    return y if epilogue.residual is None else epilogue.residual.view_as(y) + y
