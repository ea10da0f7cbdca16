"""The epilogue of a product, without a kernel of its own: an activation, then a residual addition; or gating."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS

NO_ACTIVATION = -1
"""Where kernels take the number of an activation function."""
GATE = "silu"
"""The activation function of gates."""
GATED = 1 << 8
"""Added to its number where kernels take it with the product of gates and ups."""
GATED_ROWS = 8
"""Gates, and as many ups behind them, that stand together in the rows of a gated product's weight."""


@dataclass(frozen=True, eq=False)
class Epilogue:
    """residual + activation(y) for a product y [..., N]; or gated, silu(gate) * up [..., N / 2].

    activation: of ACTIVATIONS, or None. residual: of y's shape and type, or None. gated: y is gates and ups in turn,
    GATED_ROWS of each. Raises KernelError for one that is gated and something else.
    """

    activation: str | None = None
    residual: Tensor | None = None
    gated: bool = False

    def __post_init__(self) -> None:
        if self.gated and (self.activation is not None or self.residual is not None):
            raise KernelError("a gated product has no other activation, and no residual")

    @property
    def number(self) -> int:
        """The activation as kernels take it."""
        if self.gated:
            return GATED + ACTIVATIONS[GATE].number
        return NO_ACTIVATION if self.activation is None else ACTIVATIONS[self.activation].number

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
GATED_SILU = Epilogue(gated=True)
"""silu(gate) * up."""


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Tensor:
    """The epilogue of y by torch, every step rounding to y's type: the kernels' bits, up to tanh and exp."""
    if epilogue.gated:
        gates, ups = y.unflatten(-1, (-1, 2, GATED_ROWS)).unbind(-2)
        return (ACTIVATIONS[GATE].apply(gates) * ups).flatten(-2)
    if epilogue.activation is not None:
        y = ACTIVATIONS[epilogue.activation].apply(y)
    return y if epilogue.residual is None else epilogue.residual.view_as(y) + y
