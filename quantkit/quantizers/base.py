"""What a quantizer is given."""

from __future__ import annotations

from dataclasses import dataclass

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
