"""Every kind of recipe from calibration to logits with a GPU: what it writes there runs there, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.recipe import load_recipe
from tests.tiny import VOCABULARY

RTOL = 2e-2  # activations in fp16 on a GPU against fp32 on a CPU, through two blocks
FOUR_BITS_RTOL = 0.25  # the same where they become 4-bit codes, of which some round the other way
RECIPES = {
    "rtn-w4-g128": ("llama", RTOL),
    "gptq-w4-g128": ("llama", RTOL),
    "hqq-w4-g128": ("llama", RTOL),
    "nuqmm-q3-g128": ("opt", RTOL),
    "bcq-w3-g128-comp": ("llama", RTOL),
    "bcq-w4-g64-s8": ("opt", RTOL),
    "bcq-w4-g128-head6": ("llama", RTOL),
    "best-2bit": ("llama", RTOL),
    "trellis-w3": ("opt", RTOL),
    "flatten-o1": ("opt", RTOL),
    "flatten-o3": ("opt", FOUR_BITS_RTOL),
    "smoothquant": ("llama", RTOL),
    "w8a8-rotated": ("llama", RTOL),
    "bipolar-w4a8": ("opt", RTOL),
    "bipolar-w4a4": ("opt", FOUR_BITS_RTOL),
    "bipolar-w4a4-rotated": ("llama", FOUR_BITS_RTOL),
}


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_on_a_gpu_from_the_weights_to_the_logits(
    recipe: str, tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    family, rtol = RECIPES[recipe]
    quantize_model(
        str(tiny_model(family)),
        load_recipe(recipe),
        tmp_path / "q",
        calibration=calibrated(family),
        options=QuantizeOptions(device="cuda"),
    )
    ids = torch.randint(5, VOCABULARY, (2, 24))
    logits = []
    for device, dtype in (("cuda", torch.float16), ("cpu", torch.float32)):
        model: Any = quantkit.load(str(tmp_path / "q"), device=device, dtype=dtype)
        with torch.no_grad():
            logits.append(model(ids.to(device)).logits.cpu().double())
    assert (logits[0] - logits[1]).norm() < rtol * logits[1].norm()
