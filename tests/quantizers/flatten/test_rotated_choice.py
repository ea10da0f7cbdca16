"""``rotate_inputs: auto``: where it is a choice, what is chosen, and that the layer computes the same either way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.errors import RecipeError
from quantkit.methods import plan_layers
from quantkit.models.experts import separate_experts
from quantkit.models.families import block_linears, linear_shape
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import AUTO, LayerInput
from quantkit.quantizers.flatten.quantizer import flattened_activations, plan_layout, quantize
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.quantizers.flatten.smoothing import fold_smoothing
from quantkit.quantizers.rotation import placed_rotations
from quantkit.recipe import Recipe
from tests.quantizers.flatten.layers import stats_of
from tests.tiny import build_model

COLUMNS, ROWS, TOKENS = 64, 48, 256
SETTINGS = FlattenSettings(smoothing="none", rotate_inputs=AUTO, column_price=0.028)
W8A8_ERROR = 2e-3  # ||dy||^2 / ||y||^2 of eight-bit codes; a wrong scale or rotation gives about 1


def _layer(kind: str) -> LayerInput:
    """gated: every token drives some channels far, each token others. massive: one token drives one channel."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, COLUMNS, generator=generator)
    if kind == "gated":
        x = x * torch.randn(TOKENS, COLUMNS, generator=generator) ** 3
    else:
        x[7, 5] = 2000.0
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.1
    return LayerInput("block.0.down_proj", weight, stats_of(x))


def _x(layer: LayerInput) -> Tensor:
    assert layer.stats is not None
    return layer.stats.sample


@pytest.mark.parametrize(("kind", "rotated"), [("gated", True), ("massive", False)])
def test_the_choice_is_the_cheaper_one(kind: str, rotated: bool) -> None:
    layer = _layer(kind)
    chosen, plain, turned = (plan_layout(layer, replace(SETTINGS, rotate_inputs=own)) for own in (AUTO, False, True))
    price = SETTINGS.column_price
    assert chosen.rotated is rotated
    assert chosen.cost(price) == min(plain.cost(price), turned.cost(price))
    assert plain.cost(price) != turned.cost(price)
    assert quantize(layer, SETTINGS).spec.rotate_inputs is rotated


def test_a_rotated_input_is_behind_what_its_smoothing_was_folded_into() -> None:
    layer, scale = _layer("gated"), torch.linspace(0.8, 1.25, COLUMNS)
    folded = replace(layer, weight=layer.weight * scale, folded_scale=scale)
    packed = quantize(folded, SETTINGS)
    assert packed.spec.rotate_inputs
    assert not packed.spec.smooth
    exact = _x(layer) @ layer.weight.t()
    linear = QuantizedLinear.from_packed(packed, None, torch.float32)
    for prepared in (False, True):
        if prepared:
            linear.prepare()
        error = (linear(_x(layer) / scale) - exact).square().sum() / exact.square().sum()
        assert error < W8A8_ERROR


def test_an_input_that_nothing_feeds_is_rotated_or_smoothed() -> None:
    packed = {kind: quantize(_layer(kind), replace(SETTINGS, smoothing="smoothquant")) for kind in ("gated", "massive")}
    assert {kind: (one.spec.rotate_inputs, one.spec.smooth) for kind, one in packed.items()} == {
        "gated": (True, False),
        "massive": (False, True),
    }


def test_the_hessian_is_of_what_was_chosen() -> None:
    layer = _layer("gated")
    found, expected = (
        flattened_activations(layer, replace(SETTINGS, rotate_inputs=own))(_x(layer)) for own in (AUTO, True)
    )
    assert torch.equal(found, expected)


def test_gptq_rounds_what_was_chosen() -> None:
    layer = _layer("gated")
    mixed = _x(layer) @ (torch.eye(COLUMNS) + 0.3 * torch.ones(COLUMNS, COLUMNS) / COLUMNS**0.5)  # correlated
    layer = replace(layer, stats=stats_of(mixed))
    settings = replace(SETTINGS, bits=4, gptq=True)
    features = flattened_activations(layer, settings)(mixed)
    layer = replace(layer, hessian=features.T @ features / len(mixed))
    solved, rounded = (quantize(layer, replace(settings, gptq=gptq)) for gptq in (True, False))
    assert solved.spec.rotate_inputs
    assert solved.report["output_error"] < rounded.report["output_error"]


def test_bits_are_chosen_behind_the_rotation() -> None:
    layer = _layer("gated")
    for limit, bits in ((0.0, 8), (1e9, 4)):
        packed = quantize(layer, replace(SETTINGS, bits="mixed", kl_ratio_limit=limit))
        assert (packed.spec.rotate_inputs, packed.spec.act_bits) == (True, bits)


def _plans(model: torch.nn.Module) -> dict[str, Any]:
    recipe = Recipe("own", "flatten", {"rotate_inputs": AUTO, "smoothing": "smoothquant"})
    return placed_rotations(model, plan_layers(recipe, list(block_linears(model))))


@pytest.mark.parametrize(
    ("family", "ends"), [("llama", "mlp.down_proj"), ("qwen3_moe", "down_proj"), ("mixtral", "w2"), ("opt", None)]
)
def test_only_the_last_linear_of_a_gated_ffn_has_the_choice(family: str, ends: str | None) -> None:
    model = build_model(family)
    separate_experts(model)
    plans = _plans(model)
    choosing = {name for name, plan in plans.items() if plan.settings.rotate_inputs == AUTO}
    assert choosing == {name for name in plans if ends is not None and name.endswith(f".{ends}")}
    assert all(plan.settings.rotate_inputs is False for name, plan in plans.items() if name not in choosing)


def test_a_width_without_a_block_leaves_no_choice() -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=100, num_hidden_layers=1, vocab_size=320)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert not any(plan.settings.rotate_inputs for plan in _plans(model).values())


def test_what_feeds_a_choice_is_smoothed(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    plans = _plans(model)
    layers = {name: stats_of(torch.randn(8, linear_shape(module)[1])) for name, module in block_linears(model).items()}
    done = fold_smoothing(model, plans, SimpleNamespace(layers=layers))
    assert {name for name in plans if name.endswith("down_proj")} <= done.folded_scales.keys()


def test_an_input_without_a_sample_stays_as_it_is() -> None:
    layer = _layer("gated")
    assert layer.stats is not None
    bare = replace(layer, stats=replace(layer.stats, sample=torch.empty(0, COLUMNS)))
    assert not plan_layout(bare, SETTINGS).rotated


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(RecipeError, match="rotate_inputs is 'perhaps'; choose true, false or auto"):
        FlattenSettings(rotate_inputs="perhaps")
