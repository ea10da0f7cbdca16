"""Weight-only Linears of a model on the CPU, expanded once to what their reference expands them to at every call.

The bits of every result stay the same, and a token takes the time of the floating-point model. It takes its memory too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil
from torch import nn

from quantkit.formats.bipolar import FLOAT_ACT_BITS
from quantkit.formats.table import FORMATS
from quantkit.nn.quantized_linear import QuantizedLinear

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


def _is_weight_only(module: Any) -> bool:
    if not isinstance(module, QuantizedLinear):
        return False
    return FORMATS[module.format_name].act_bits(module.spec) == FLOAT_ACT_BITS and module.follower is None


def _plain(module: Any) -> nn.Linear:
    linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    linear.weight = nn.Parameter(module.dequantize().to(module.compute_dtype), requires_grad=False)
    linear.bias = module.bias
    return linear
