"""Weight-only Linears, expanded once to what their reference, or a GPU for many tokens, expands them to at every call.

On a CPU the bits of every result stay the same, and a token takes the time of the floating-point model. It takes its
memory too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.formats.bipolar import FLOAT_ACT_BITS
from quantkit.formats.table import FORMATS
from quantkit.memory import free_bytes
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.rotation.op import rotate_inputs
from quantkit.progress import say

_SPARE = 1 << 30  # bytes left for everything else


@dataclass(frozen=True)
class Expansion:
    """linears: how many are weight-only. bytes: what they take expanded. done: whether memory allowed it."""

    linears: int
    bytes: int
    done: bool


def expand_weights(model: nn.Module) -> Expansion:
    """Replace every weight-only Linear by a plain one, where all of them fit into the memory that is free.

    Linears with quantized activations stay: their products are of integers.
    """
    expansion = expansion_of(model)
    if expansion.done:
        for name, module in _weight_only(model).items():
            model.set_submodule(name, _plain(module))
    return expansion


def expansion_of(model: nn.Module) -> Expansion:
    """What expanding a model would be; ``done``: whether memory allows it."""
    found = _weight_only(model).values()
    needed = sum(m.in_features * m.out_features * m.compute_dtype.itemsize for m in found)
    return Expansion(len(found), needed, needed + _SPARE <= free_bytes(torch.device("cpu")))


@contextmanager
def expanded(module: nn.Module) -> Iterator[None]:
    """While entered, every weight-only Linear of a module is a plain one: for text that runs through it in windows."""
    found = _weight_only(module)
    for name, linear in found.items():
        module.set_submodule(name, _plain(linear))
    try:
        yield
    finally:
        for name, linear in found.items():
            module.set_submodule(name, linear)


@contextmanager
def expanded_on_cpu(model: Any) -> Iterator[None]:
    """As ``expanded`` for a model on a CPU, for requests of a few tokens; where memory does not allow it, says so."""
    expansion = expansion_of(model)
    if model.device.type != "cpu" or not expansion.linears:
        yield
    elif expansion.done:
        with expanded(model):
            yield
    else:
        say(
            f"too little memory to expand the weights once ({expansion.bytes / 1e9:.2f} GB): every request does, slowly"
        )
        yield


def _weight_only(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear) and _is_weight_only(module)
    }


def _is_weight_only(module: QuantizedLinear) -> bool:
    return FORMATS[module.format_name].act_bits(module.spec) == FLOAT_ACT_BITS and module.follower is None


class _BehindRotation(nn.Linear):
    """A Linear that takes x Q in place of x (formats/hadamard.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rotate_inputs(x))


def _plain(module: QuantizedLinear) -> nn.Linear:
    """The product as the reference computes it: of W Q and x Q where inputs are rotated."""
    rotated = getattr(module.spec, "rotate_inputs", False)
    kind, spec = (_BehindRotation, replace(module.spec, rotate_inputs=False)) if rotated else (nn.Linear, module.spec)
    linear = kind(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    weight = FORMATS[module.format_name].dequantize(spec, module.tensors, module.shape)
    linear.weight = nn.Parameter(weight.to(module.compute_dtype), requires_grad=False)
    linear.register_parameter("bias", module.bias)
    return linear
