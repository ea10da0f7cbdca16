"""Weight-only Linears, expanded once to what their reference, or a GPU for many tokens, expands them to at every call.

On a CPU the bits of every result stay the same, and a token takes the time of the floating-point model. It takes its
memory too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import psutil
from torch import Tensor, nn

from quantkit.formats.bipolar import FLOAT_ACT_BITS
from quantkit.formats.table import FORMATS
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.rotation.op import rotate_inputs

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
    found = {name: module for name, module in model.named_modules() if _is_weight_only(module)}
    needed = sum(m.in_features * m.out_features * m.compute_dtype.itemsize for m in found.values())
    if needed + _SPARE > psutil.virtual_memory().available:
        return Expansion(len(found), needed, False)
    for name, module in found.items():
        model.set_submodule(name, _plain(module))
    return Expansion(len(found), needed, True)


@contextmanager
def expanded(module: nn.Module) -> Iterator[None]:
    """While entered, every weight-only Linear of a module is a plain one: for text that runs through it in windows."""
    found = {name: linear for name, linear in module.named_modules() if _is_weight_only(linear)}
    for name, linear in found.items():
        module.set_submodule(name, _plain(linear))
    try:
        yield
    finally:
        for name, linear in found.items():
            module.set_submodule(name, linear)


def _is_weight_only(module: Any) -> bool:
    if not isinstance(module, QuantizedLinear):
        return False
    return FORMATS[module.format_name].act_bits(module.spec) == FLOAT_ACT_BITS and module.follower is None


class _BehindRotation(nn.Linear):
    """A Linear that takes x Q in place of x (formats/hadamard.py)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(rotate_inputs(x))


def _plain(module: Any) -> nn.Linear:
    """The product as the reference computes it: of W Q and x Q where inputs are rotated."""
    rotated = getattr(module.spec, "rotate_inputs", False)
    kind, spec = (_BehindRotation, replace(module.spec, rotate_inputs=False)) if rotated else (nn.Linear, module.spec)
    linear = kind(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    weight = FORMATS[module.format_name].dequantize(spec, module.tensors, module.shape)
    linear.weight = nn.Parameter(weight.to(module.compute_dtype), requires_grad=False)
    linear.bias = module.bias
    return linear
