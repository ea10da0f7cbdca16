"""What is done to the whole model before its Linears are flattened: rotated where a recipe asks for it, smoothed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from quantkit.quantizers.base import Transformed
from quantkit.quantizers.flatten.smoothing import fold_smoothing
from quantkit.quantizers.rotation import fold_rotation
from quantkit.stats import LayerStats


def rotate_and_smooth(model: nn.Module, plans: Mapping[str, Any], calibration: Any) -> Transformed:
    """Fold the rotation into the weights, then what smooths the rotated inputs; the function stays the same.

    Arguments, and what it raises, as of fold_rotation and fold_smoothing. Rotated statistics are those of the sample,
    which reaches less far than all of the text does: ``headroom`` is for that.
    """
    rotated = fold_rotation(model, plans, calibration)
    stats = {name: _with_reach(own, calibration.layers[name]) for name, own in rotated.stats.items()}
    known = replace(calibration, layers={**calibration.layers, **stats})
    smoothed = fold_smoothing(model, plans, known)
    return Transformed({**smoothed.report, **rotated.report}, smoothed.folded_scales, stats)


def _with_reach(rotated: LayerStats, before: LayerStats) -> LayerStats:
    """The same with a reach of the vocabulary, of which only maxima before the rotation are known: the sample's own.

    Behind an RMS norm all rows are of one length, so no rotated row reaches much further than others. The heads' values
    of ``rotate: online`` are behind none: there it is ``headroom`` alone that covers other texts.
    """
    return rotated if before.vocabulary_absmax is None else replace(rotated, vocabulary_absmax=rotated.absmax)
