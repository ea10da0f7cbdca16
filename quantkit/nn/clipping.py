"""Counting, at run time, the activations that a static scale clamps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quantkit.formats.flatten import max_code, segment_capacity
from quantkit.nn.quantized_linear import QuantizedLinear, is_flatten
from quantkit.ops.flatten.op import integer_activations


@dataclass
class ClipCount:
    """Input values of one layer so far: how many were seen, and how many lay above what their channel holds."""

    seen: int = 0
    clipped: int = 0

    @property
    def rate(self) -> float:
        """Share of the values that were clamped; 0 before any was seen."""
        return self.clipped / self.seen if self.seen else 0.0


@contextmanager
def count_clipping(model: nn.Module) -> Iterator[dict[str, ClipCount]]:
    """While entered, count what every ``flatten`` layer of the model clamps; yields the counts by module name.

    Costs a second pass over each input, so it is for measuring, not for serving.
    """
    counts: dict[str, ClipCount] = {}
    handles = []
    for name, module in model.named_modules():
        if is_flatten(module):
            counts[name] = ClipCount()
            handles.append(module.register_forward_pre_hook(_counter(counts[name])))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _counter(count: ClipCount) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def watch(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, QuantizedLinear)
        x: Tensor = arguments[0]
        tensors = module.tensors
        slices = segment_capacity(tensors["source_channel"], tensors["source_segment"], x.shape[-1])
        q = integer_activations(x, tensors["act_scale"], tensors.get("smooth_scale"))
        count.seen += x.numel()
        count.clipped += int((q.abs() > slices * max_code(module.spec.act_bits)).sum())

    return watch
