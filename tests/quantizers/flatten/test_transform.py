"""A rotation in front of smoothing: the function stays, and what the layers read is told as it is then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantkit.calibration.artifact import Calibration
from quantkit.methods import LayerPlan, plan_layers
from quantkit.models.families import block_linears
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.quantizers.flatten.transform import rotate_and_smooth
from quantkit.quantizers.rotation import placed_rotations
from quantkit.recipe import Recipe
from quantkit.stats import LayerStats, magnitude_histogram

LOGIT_ATOL = 2e-4  # two blocks in fp32, rotated and smoothed
READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def _recorded(model: torch.nn.Module, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(inputs of the Linears by name, logits)."""
    inputs: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, arguments, name=name: inputs.__setitem__(name, arguments[0].detach().flatten(0, 1).clone())
        )
        for name, module in block_linears(model).items()
    ]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return inputs, logits


def _calibration(inputs: dict[str, Tensor], *, vocabulary: bool) -> Calibration:
    layers = {}
    for name, x in inputs.items():
        stats = LayerStats(
            x.abs().amax(0), x.abs().mean(0), x.square().mean(0), magnitude_histogram(x), x.clone(), len(x)
        )
        layers[name] = replace(stats, vocabulary_absmax=2 * stats.absmax) if vocabulary else stats
    return Calibration(layers, torch.zeros(1, 1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("smoothing", ["none", "smoothquant"])
@pytest.mark.parametrize("vocabulary", [False, True], ids=["text", "vocabulary"])
def test_rotation_and_smoothing_leave_the_function(
    smoothing: str, vocabulary: bool, tiny_model: Callable[[str], Path]
) -> None:
    model, ids = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval(), torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms are 1 in a fresh model
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter))
    inputs, before = _recorded(model, ids)
    settings = FlattenSettings(rotate=True, smoothing=smoothing)
    plans = {name: LayerPlan("flatten", settings) for name in inputs}
    done = rotate_and_smooth(model, plans, _calibration(inputs, vocabulary=vocabulary))
    after, logits = _recorded(model, ids)
    torch.testing.assert_close(logits, before, rtol=0, atol=LOGIT_ATOL)
    assert done.report["rotated"] == 72
    assert {name for name in inputs if name.endswith(READERS)} == set(done.stats)
    for name, stats in done.stats.items():
        folded = done.folded_scales.get(name, torch.ones(72))
        torch.testing.assert_close(stats.sample, after[name] * folded, rtol=1e-3, atol=LOGIT_ATOL)
        assert (stats.vocabulary_absmax is not None) is vocabulary


def test_inputs_that_are_rotated_as_the_model_runs_are_not_smoothed(tiny_model: Callable[[str], Path]) -> None:
    """With ``rotate: online`` those of down_proj, whose scale would be folded into up_proj."""
    model, ids = AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval(), torch.arange(40).reshape(2, 20)
    inputs, before = _recorded(model, ids)
    plans = placed_rotations(model, plan_layers(Recipe("own", "flatten", {"rotate": "online"}), list(inputs)))
    done = rotate_and_smooth(model, plans, _calibration(inputs, vocabulary=False))
    _, logits = _recorded(model, ids)
    torch.testing.assert_close(logits, before, rtol=0, atol=LOGIT_ATOL)
    online = {name for name, plan in plans.items() if plan.settings.rotate_inputs}
    assert online == {name for name in inputs if name.endswith("down_proj")}
    assert not online & done.folded_scales.keys()
    assert done.folded_scales
    assert not any(source.endswith("up_proj") for source in done.report["folded_into"])
