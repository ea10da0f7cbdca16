"""Activation functions that a product can apply before it passes its result on as codes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu


@dataclass(frozen=True)
class Activation:
    """One function of torch or transformers.

    number: as kernels take it. apply: elementwise, in the type of its argument; every step rounds to it.
    exact: the kernel's bits are torch's by construction; elsewhere they hang on both having the same tanh, erf or exp.
    """

    number: int
    apply: Callable[[Tensor], Tensor]
    exact: bool = False


def _gelu_new(x: Tensor) -> Tensor:
    """GPT-2's, as transformers writes it: the order of the operations decides the bits."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_fast(x: Tensor) -> Tensor:
    """BLOOM's, likewise."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(0, relu, exact=True),
    "gelu": Activation(1, gelu),
    "gelu_tanh": Activation(2, partial(gelu, approximate="tanh")),
    "silu": Activation(3, silu),
    "gelu_new": Activation(4, _gelu_new),
    "gelu_fast": Activation(5, _gelu_fast),
}


@torch.no_grad()
def activation_name(module: nn.Module) -> str | None:
    """Which of ACTIVATIONS the module computes, bit for bit on a grid of fp32 numbers; None for any other.

    module: elementwise, without parameters. Comparing values spares a list of every library's class names.
    """
    probe = torch.linspace(-9, 9, 4801)
    result = module(probe.clone())
    return next((name for name, known in ACTIVATIONS.items() if torch.equal(known.apply(probe), result)), None)
