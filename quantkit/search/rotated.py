"""A search of the rotated model: what a plan with ``rotate`` will quantize is what the errors are measured of."""

from __future__ import annotations

from dataclasses import replace

from quantkit.calibration.artifact import Calibration
from quantkit.models.stream import ModelStream
from quantkit.quantizers.rotation import rotate_part
from quantkit.stats import LayerStats


def rotate_parts(stream: ModelStream, calibration: Calibration, *, values: bool) -> Calibration:
    """Rotate every part of the model whenever it is read; the calibration, of the rotated layers' inputs.

    values: those of every head too. Raises RecipeError for a model of another family.
    """
    stats: dict[str, LayerStats] = {}

    def rotate_first(part: str | None) -> None:
        stats.update(rotate_part(stream.model, part, values=values, calibration=calibration))

    def rotate_again(part: str | None) -> None:
        rotate_part(stream.model, part, values=values, calibration=None)

    stream.edit_parts(rotate_first)
    for _ in stream.parts():
        pass
    stream.edit_parts(rotate_again)
    return replace(calibration, layers={**calibration.layers, **stats})
