"""What a quantizer is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.stats import LayerStats

ACTIVATIONS, END_LOSS = "activations", "end_loss"
ONLINE = "online"  # of ``rotate``, beside false and true
AUTO = "auto"  # of ``rotate_inputs``, for methods that choose layer by layer


def check_hessian_kind(kind: str, *, used: bool) -> None:
    """Raise RecipeError for a ``hessian`` that is not known, or that nothing uses."""
    if kind not in (ACTIVATIONS, END_LOSS):
        raise RecipeError(f"hessian is {kind!r}; choose {ACTIVATIONS} or {END_LOSS}")
    if kind == END_LOSS and not used:
        raise RecipeError(f"hessian: {END_LOSS} is for compensation; set compensate: true, or leave hessian out")


def check_rotate(rotate: bool | str) -> None:
    """Raise RecipeError for a ``rotate`` that is not known."""
    if rotate not in (False, True, ONLINE):
        raise RecipeError(f"rotate is {rotate!r}; choose true, false or {ONLINE}")


@dataclass(frozen=True)
class LayerInput:
    """Everything a quantizer may use for one Linear.

    name: the module's name, for error messages.
    weight: [N, K] fp32, contiguous, checked finite.
    stats: input statistics, or None where no calibration artifact was given.
    hessian: [K, K] fp32, mean of x x^T over the calibration tokens, or None unless the method asked for it; of the
        method's ``hessian_features`` of x where it has them. [G, K, K] where tokens are weighed by the end loss: one
        for each of G equal parts of the rows (``row_parts``).
    folded_scale: [K] fp32, what a transform already took out of the input and put into the weight (smoothing):
        ``weight`` has it in, ``stats`` are of the input before. None where nothing was folded.
    memo: what a method keeps of the Hessian for the next time that it quantizes this layer with other settings.
    """

    name: str
    weight: Tensor
    stats: LayerStats | None = None
    hessian: Tensor | None = None
    folded_scale: Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def row_parts(self) -> list[LayerInput]:
        """The parts of the rows that have a Hessian [K, K] each; the layer itself where it has one or none."""
        if self.hessian is None or self.hessian.ndim == 2:
            return [self]
        parts = zip(self.weight.tensor_split(len(self.hessian)), self.hessian, strict=True)
        return [replace(self, weight=weight, hessian=hessian) for weight, hessian in parts]

    def importance(self) -> Tensor:
        """[K] fp32 weight of the squared error per input channel: E[x^2], or 1 without statistics."""
        if self.stats is None:
            return torch.ones(self.weight.shape[1], device=self.weight.device)
        return self.stats.mean_square.to(self.weight)


@dataclass(frozen=True)
class Transformed:
    """What a method's edit of the whole model did.

    report: JSON values for quantkit.json. folded_scales: LayerInput.folded_scale by layer name. stats: LayerInput.stats
    by layer name, where the edit changed the layer's input in another way than by a scale.
    """

    report: Mapping[str, Any]
    folded_scales: Mapping[str, Tensor] = field(default_factory=dict)
    stats: Mapping[str, LayerStats] = field(default_factory=dict)


def error_report(layer: LayerInput, dequantized: Tensor) -> dict[str, Any]:
    """How far a quantized weight [N, K] is from the original.

    ``weight_error`` is ||W - W'||^2 / ||W||^2; ``output_error`` weights both by E[x^2] per input channel, which is
    the relative error of the output for uncorrelated channels. 0 for a weight that is all zero.
    """
    squared_error = (dequantized - layer.weight).square().sum(dim=0, dtype=torch.float64)
    squared_norm = layer.weight.square().sum(dim=0, dtype=torch.float64)
    report = {"weight_error": _ratio(squared_error, squared_norm)}
    if layer.stats is not None:
        importance = layer.importance().double()
        report["output_error"] = _ratio(squared_error * importance, squared_norm * importance)
    return report


def _ratio(error: Tensor, norm: Tensor) -> float:
    total = norm.sum().item()
    return error.sum().item() / total if total else 0.0
