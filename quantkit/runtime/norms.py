"""LayerNorm and RMSNorm of single tokens by ops/decode/op.py, also with the residual addition before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from quantkit.models.families import norm_kind
from quantkit.ops.bcq.arranged import InputOrder, ProductInput, arranged_norm
from quantkit.ops.decode.layout import can_norm
from quantkit.ops.decode.op import add_norm, norm


@dataclass(frozen=True, eq=False)
class FastNorm:
    """What stands in for a norm's forward, ``original``, on the types and sizes that the kernels take."""

    original: Callable[[Tensor], Tensor]
    weight: Tensor
    bias: Tensor | None
    epsilon: float
    centered: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [..., K]."""
        if not self._takes(x):
            return self.original(x)
        return norm(x, self.weight, self.bias, self.epsilon, centered=self.centered)

    def in_order(self, x: Tensor, order: InputOrder | None) -> ProductInput:
        """The same in the order in which a product reads it, where there is one and the kernels take x."""
        if order is None or not self._takes(x):
            return self(x)
        return arranged_norm(x, (self.weight, self.bias), self.epsilon, order, centered=self.centered)

    def after_adding(self, residual: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """residual + y, both [..., K], and the norm of it."""
        if not self._takes(y) or residual.dtype != y.dtype or residual.shape != y.shape:
            total = residual + y
            return total, self(total)
        return add_norm(residual, y, (self.weight, self.bias), self.epsilon, centered=self.centered)

    def _takes(self, x: Tensor) -> bool:
        return can_norm(x) and self.weight.dtype == x.dtype


def fast_norm(module: nn.Module) -> FastNorm | None:
    """The module's norm by the kernels, or None where it is none, or none over the last dimension with a weight."""
    kind = norm_kind(module)
    weight = None if kind is None else getattr(module, "weight", None)
    if kind is None or not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    return FastNorm(module.forward, weight, getattr(module, "bias", None), getattr(module, kind.epsilon), kind.centered)
