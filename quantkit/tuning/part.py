"""A Linear whose stored values have gradients, whatever its format: what all of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.formats.base import PackedWeight
from quantkit.formats.hadamard import unrotate_by_product
from quantkit.nn.quantized_linear import QuantizedLinear


class TunedPart(nn.Module, ABC):
    """y = x W^T + bias; the parameters are what W is made of, before they are rounded to what is stored.

    latent: [N, K], the weights that codes are chosen for, or None for codes that stay. held: [N, K], what is
    multiplied by inside of ``expanded_once``, else None.
    """

    scales: nn.Parameter
    latent: nn.Parameter | None
    held: Tensor | None

    def __init__(self, linear: QuantizedLinear):
        """linear: whose values are taken over."""
        super().__init__()
        self.spec, self.shape, self._report_dtype = linear.spec, linear.shape, linear.compute_dtype
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().float())
        self.held = None

    @property
    def weight(self) -> Tensor:
        """A stand-in of the right shape, dtype and device that takes no memory (model code asks for these)."""
        return torch.zeros((), dtype=self.scales.dtype, device=self.scales.device).expand(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] of x [..., K], both in fp32."""
        return nn.functional.linear(x, self.expanded() if self.held is None else self.held, self.bias)

    def expanded(self) -> Tensor:
        """The weight [N, K] fp32 that x is multiplied by as it is. Rotating inputs back into the weight is less work
        than rotating those of all tokens."""
        weight = self.dequantize()
        return unrotate_by_product(weight) if self.spec.rotate_inputs else weight

    @property
    def values(self) -> list[nn.Parameter]:
        """What W is made of: all parameters but the bias."""
        return [parameter for parameter in self.parameters() if parameter is not self.bias]

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The weight [N, K] fp32 of the values as they would be stored; W Q where inputs are rotated."""

    @abstractmethod
    def packed(self) -> PackedWeight:
        """The format's tensors of the values at hand; what is read back is what ``dequantize`` gave, bit for bit."""

    def quantized(self) -> QuantizedLinear:
        """The Linear that stores the values at hand."""
        bias = None if self.bias is None else self.bias.detach()
        return QuantizedLinear.from_packed(self.packed(), bias, self._report_dtype)


@contextmanager
def holding(parts: Sequence[TunedPart], weights: Sequence[Tensor]) -> Iterator[None]:
    """While entered, each Linear multiplies by its weight of these."""
    for part, weight in zip(parts, weights, strict=True):
        part.held = weight
    try:
        yield
    finally:
        for part in parts:
            part.held = None


@contextmanager
def expanded_once(parts: Sequence[TunedPart]) -> Iterator[None]:
    """While entered, each Linear multiplies by one expanded weight, as the values are at the start.

    On leaving, the gradient that the weights have gathered in all backward passes goes on to the values. The windows of
    a step take most of their time expanding otherwise. Holds a weight and its gradient in fp32 for every Linear.
    """
    weights = [part.expanded() for part in parts]
    held = [weight.detach().requires_grad_() for weight in weights]
    with holding(parts, held):
        yield
    for weight, each in zip(weights, held, strict=True):
        pass_on(weight, each)


def pass_on(weight: Tensor, held: Tensor) -> None:
    """Give the values of a weight the gradient of what was multiplied by in its place."""
    weight.backward(torch.zeros_like(held) if held.grad is None else held.grad)  # an expert may have had no token


class Straight(torch.autograd.Function):
    """The second value, with the gradient of the first."""

    @staticmethod
    def forward(_ctx: Any, _value: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
