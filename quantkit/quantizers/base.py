"""What a quantizer is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.stats import LayerStats


@dataclass(frozen=True)
class LayerInput:
    """Everything a quantizer may use for one Linear.

    name: the module's name, for error messages.
    weight: [N, K] fp32, contiguous, checked finite.
    stats: input statistics, or None where no calibration artifact was given.
    hessian: [K, K] fp32, mean of x x^T over the calibration tokens, or None unless the method asked for it.
    """

    name: str
    weight: Tensor
    stats: LayerStats | None = None
    hessian: Tensor | None = None

    def importance(self) -> Tensor:
        """[K] fp32 weight of the squared error per input channel: E[x^2], or 1 without statistics."""
        if self.stats is None:
            return torch.ones(self.weight.shape[1], device=self.weight.device)
        return self.stats.mean_square.to(self.weight)


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
