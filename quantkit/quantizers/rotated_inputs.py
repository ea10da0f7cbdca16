"""Quantizing a Linear behind the rotation of its input (formats/hadamard.py): W Q is coded, to be multiplied by x Q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.formats.base import PackedWeight
from quantkit.formats.hadamard import block_width, inverse_root, rotate
from quantkit.formats.table import dequantize
from quantkit.quantizers.base import LayerInput, error_report
from quantkit.stats import LayerStats, stats_of_sample, trust

_MEMO = "rotated"


def rotated_inputs(layer: LayerInput) -> LayerInput:
    """The same layer behind the rotation of its input: W Q, Q^T H Q, and statistics of x Q.

    The layer's memo keeps it, so that it is made once for all settings that the layer is quantized with.
    """
    if _MEMO not in layer.memo:
        hessian, stats = layer.hessian, layer.stats
        layer.memo[_MEMO] = replace(
            layer,
            weight=rotate(layer.weight),
            hessian=None if hessian is None else _on_both_sides(hessian),
            stats=None if stats is None else rotated_stats(stats),
        )
    found: LayerInput = layer.memo[_MEMO]
    return found


def quantize_rotated(
    layer: LayerInput, settings: Any, quantize: Callable[[LayerInput, Any], PackedWeight]
) -> PackedWeight:
    """The layer quantized behind the rotation of its input; the report is of W itself.

    settings: have ``rotate_inputs``, without which ``quantize`` is called.
    """
    packed = quantize(rotated_inputs(layer), replace(settings, rotate_inputs=False))
    whole = replace(packed, spec=replace(packed.spec, rotate_inputs=True))
    return replace(whole, report={**packed.report, **error_report(layer, dequantize(whole))})


def _on_both_sides(hessian: Tensor) -> Tensor:
    """Q^T H Q of a symmetric H [K, K]."""
    return rotate(rotate(hessian).t()).t().contiguous()


def rotated_stats(stats: LayerStats) -> LayerStats:
    """Those of the rotated sample, but E[x^2] nearer to that of independent channels the smaller the sample is.

    How far x reached beyond the sample is known before the rotation alone. A block reaches beyond it as many times as
    far as its largest channel did, which is exact where that channel is all there is. So one that is 0 in the sample
    is taken to reach.
    """
    sample = rotate(stats.sample)
    width = block_width(sample.shape[1])
    independent = stats.mean_square.unflatten(0, (-1, width)).mean(dim=1).repeat_interleave(width)
    found = stats_of_sample(stats, sample) if len(sample) else replace(stats, sample=sample)
    largest = stats.sample.abs().amax(dim=0) if len(sample) else torch.zeros_like(stats.absmax)

    def reached(absmax: Tensor) -> Tensor:
        seen, all_text = (x.unflatten(0, (-1, width)).amax(dim=1).repeat_interleave(width) for x in (largest, absmax))
        further = (all_text / seen).clamp_min(1)
        return torch.where(seen > 0, found.absmax * further, all_text * inverse_root(width))

    return replace(
        found,
        absmax=reached(stats.absmax),
        mean_square=torch.lerp(independent, found.mean_square, trust(len(sample))),
        vocabulary_absmax=None if stats.vocabulary_absmax is None else reached(stats.vocabulary_absmax),
    )
