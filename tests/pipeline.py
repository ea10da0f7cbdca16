"""A quantized tiny checkpoint, made the way the CLI makes it."""

from __future__ import annotations

from pathlib import Path

from quantkit.jobs.quantize import QuantizeOptions, QuantizeResult, quantize_model
from quantkit.recipe import load_recipe

FAMILIES = ("llama", "opt", "bloom", "gpt2")


def quantize_tiny(model: Path, out: Path, recipe: str = "bcq-w4-g128", *overrides: str) -> QuantizeResult:
    """Quantize a tiny model in groups of 32 with no calibration, unless the overrides say otherwise."""
    return quantize_model(
        str(model),
        load_recipe(recipe, ["group_size=32", *overrides]),
        out,
        calibration=None,
        options=QuantizeOptions(),
    )
