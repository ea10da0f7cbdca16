"""Putting Linears with gradients where the quantized ones of a model stand, and back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from quantkit.formats.bcq import BcqSpec
from quantkit.formats.trellis import TrellisSpec
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.tuning.layer import TunedLinear
from quantkit.tuning.part import TunedPart
from quantkit.tuning.trellis_layer import TunedTrellisLinear

TUNABLE = (BcqSpec, TrellisSpec)
"""Formats that have gradients; codes are chosen again in the first alone."""


@dataclass(frozen=True)
class Tuned:
    """What has gradients. parts: by name of the Linear. others: by name, the vectors outside of Linears (norms), and
    matrices that were asked for."""

    parts: dict[str, TunedPart]
    others: dict[str, nn.Parameter]


@contextmanager
def tunable(
    module: nn.Module, original: Callable[[str], Tensor] | None, matrices: Container[str] = ()
) -> Iterator[Tuned]:
    """While entered, the ``bcq`` and ``trellis`` Linears of a module have gradients, and so have its vectors; nothing
    else has, but for the parameters that ``matrices`` names.

    original: name of a Linear in the module -> its weight [N, K] before quantization, for codes that are chosen again,
    which those of ``trellis`` never are; None for codes that stay. On leaving, QuantizedLinears of the tuned values
    stand where they stood.
    """
    asked = {name: p.requires_grad for name, p in module.named_parameters()}
    module.requires_grad_(False)
    linears = {name: m for name, m in module.named_modules() if _is_tunable(m)}
    inside = tuple(f"{name}." for name in linears)
    floating = {name: p for name, p in module.named_parameters() if p.is_floating_point()}
    others = {n: p for n, p in floating.items() if n in matrices or (p.ndim == 1 and not n.startswith(inside))}
    for parameter in others.values():
        parameter.requires_grad_(True)
    parts: dict[str, TunedPart] = {}
    for name, linear in linears.items():
        assert isinstance(linear, QuantizedLinear)
        parts[name] = _tuned(linear, None if original is None else original(name))
        module.set_submodule(name, parts[name])
    try:
        yield Tuned(parts, others)
    finally:
        for name, part in parts.items():
            module.set_submodule(name, part.quantized())
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(asked.get(name, False)).grad = None


def _is_tunable(module: nn.Module) -> bool:
    return isinstance(module, QuantizedLinear) and isinstance(module.spec, TUNABLE)


def _tuned(linear: QuantizedLinear, original: Tensor | None) -> TunedPart:
    return TunedTrellisLinear(linear) if isinstance(linear.spec, TrellisSpec) else TunedLinear(linear, original)
