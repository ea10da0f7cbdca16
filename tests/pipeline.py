"""A quantized tiny checkpoint, made the way the CLI makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.evaluation.divergence import TokenScores, score_logits
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


@torch.no_grad()
def window_scores(reference: Any, model: Any, window: Tensor) -> TokenScores:
    """How the predictions of window[1:] by two models in memory differ; window: [seq_len]."""
    logits = [each(window[None], use_cache=False).logits[0, :-1] for each in (reference, model)]
    return score_logits(logits[0], logits[1], window[1:])
