"""Rotation of the residual stream: orthogonal, and the model's function stays the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantkit.calibration.artifact import Calibration
from quantkit.errors import RecipeError
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.methods import LayerPlan, plan_layers
from quantkit.models.experts import separate_experts
from quantkit.models.families import block_linears
from quantkit.models.loading import load_model, open_stream
from quantkit.quantizers.base import ONLINE
from quantkit.quantizers.bcq.quantizer import BcqSettings
from quantkit.quantizers.bipolar import BipolarSettings
from quantkit.quantizers.rotation import fold_rotation, placed_rotations, rotate_outside_again, rotation_matrix
from quantkit.recipe import LayerRule, Recipe, load_recipe
from quantkit.stats import LayerStats, magnitude_histogram
from tests.tiny import build_model

LOGIT_ATOL = 1e-4  # fp32 sums in another order
ORTHOGONAL_ATOL = 1e-12  # fp64
FP64_ATOL = 1e-6  # weights in fp64; the RMS norms of transformers compute in fp32
# Dense models beside the tiny Llama: biases of q, k and v; norms of heads, which together are wider than hidden states.
DENSE = ("qwen2", "qwen3")
EIGHT_BIT_SHARE = 0.05  # of the spread of the logits, what 8-bit weights move them by


def _plans(model: torch.nn.Module, rotate: bool) -> dict[str, LayerPlan]:
    return {name: LayerPlan("bipolar", BipolarSettings(rotate=rotate)) for name in block_linears(model)}


def _load(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():  # gains of 1 would hide a norm that is not folded
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2.0)
    return model


def _of_dense_family(family: str) -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32 if family == "qwen3" else 16}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads), dtype=torch.float32)


@pytest.mark.parametrize("size", [1, 7, 64, 72, 576, 960], ids="{}".format)
def test_rotation_is_orthogonal(size: int) -> None:
    matrix = rotation_matrix(size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=ORTHOGONAL_ATOL)


def test_rotation_spreads_an_outlier() -> None:
    row = torch.zeros(576, dtype=torch.float64)
    row[100] = 1000.0
    assert (row @ rotation_matrix(576)).abs().max() < 200


@pytest.mark.parametrize("rotate", [True, ONLINE])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_the_function_is_the_same_in_fp64(family: str, rotate: bool | str) -> None:
    """Every family that the rotation takes, but for those whose blocks it does not know, which it refuses."""
    model = _of_dense_family(family) if family in DENSE else build_model(family)
    model = model.eval().double()
    separate_experts(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.5, 2.0)
    ids = torch.arange(40).reshape(2, 20)
    before = model(ids).logits.detach()
    plans = {name: LayerPlan("bcq", BcqSettings(rotate=rotate)) for name in block_linears(model)}
    if family not in ("llama", *DENSE):
        with pytest.raises(RecipeError, match="Llama family"):
            fold_rotation(model, plans, None)
        return
    values = [block.self_attn.v_proj.weight.clone() for block in model.model.layers]
    done = fold_rotation(model, plans, None)
    assert ("values" in done.report) == (rotate == ONLINE)
    assert not any(
        torch.equal(block.self_attn.v_proj.weight, v) for block, v in zip(model.model.layers, values, strict=True)
    )
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=FP64_ATOL)


@pytest.mark.parametrize("rotate", ["true", ONLINE])
@pytest.mark.parametrize("recipe", ["bcq-w4-g64-s8-comp", "rtn-w4-g128"])
def test_rotated_weights_of_many_bits_leave_the_function(
    recipe: str, rotate: str, tiny_model: Callable[[str], Path], calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    quick = ["rounds=1", "sweeps=0"] if recipe.startswith("bcq") else []
    chosen = load_recipe(recipe, ["weight_bits=8", "group_size=32", f"rotate={rotate}", *quick])
    result = quantize_model(
        str(tiny_model("llama")), chosen, tmp_path / "q", calibration=calibrated("llama"), options=QuantizeOptions()
    )
    assert result.layers
    original, rotated = (load_model(str(folder))[0] for folder in (tiny_model("llama"), tmp_path / "q"))
    ids = torch.arange(40).reshape(2, 20)
    spread = original(ids).logits.std().item()
    torch.testing.assert_close(rotated(ids).logits, original(ids).logits, rtol=0, atol=EIGHT_BIT_SHARE * spread)


def test_two_methods_that_rotate_are_refused() -> None:
    rules = (LayerRule("*.q", "rtn", {"rotate": True}),)
    recipe = Recipe("mixed", "bcq", {"rotate": True}, (), rules)
    with pytest.raises(RecipeError, match="bcq and rtn both rotate"):
        plan_layers(recipe, ["a.q", "a.k"])


def test_the_model_computes_the_same(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = _load(tiny_model("llama"))
    ids = torch.arange(40).reshape(2, 20)
    before = model(ids).logits
    weight = model.model.layers[0].self_attn.q_proj.weight.clone()
    done = fold_rotation(model, _plans(model, rotate=True), None)
    assert done.report == {"rotated": 72, "seed": 0}
    assert not torch.allclose(model.model.layers[0].self_attn.q_proj.weight, weight)
    torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=LOGIT_ATOL)
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(reloaded(ids).logits, before, rtol=0, atol=LOGIT_ATOL)


@pytest.mark.parametrize("settings", [BipolarSettings(rotate=True), BcqSettings(rotate=ONLINE)], ids=["folded", ONLINE])
def test_statistics_become_those_of_the_rotated_input(settings: Any, tiny_model: Callable[[str], Path]) -> None:
    model = _load(tiny_model("llama"))
    inputs: dict[str, torch.Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda module, args: inputs.__setitem__(name, args[0].detach().flatten(0, 1))

    for name, module in block_linears(model).items():
        module.register_forward_pre_hook(record(name))
    ids = torch.arange(40).reshape(2, 20)
    model(ids)
    layers = {
        name: LayerStats(
            x.abs().amax(0), x.abs().mean(0), x.square().mean(0), magnitude_histogram(x), x.clone(), len(x)
        )
        for name, x in inputs.items()
    }
    calibration = Calibration(layers, torch.zeros(1, 1), None)  # type: ignore[arg-type]
    plans = {name: LayerPlan("any", settings) for name in block_linears(model)}
    done = fold_rotation(model, plans, calibration)
    model(ids)
    own = ("down_proj",) if settings.rotate == ONLINE else ("o_proj", "down_proj")
    assert set(done.stats) == {name for name in layers if not name.endswith(own)}
    for name, stats in done.stats.items():
        torch.testing.assert_close(stats.sample, inputs[name], rtol=0, atol=LOGIT_ATOL)
        torch.testing.assert_close(stats.mean_square, inputs[name].square().mean(0), rtol=1e-3, atol=LOGIT_ATOL)


def test_nothing_happens_unless_asked(tiny_model: Callable[[str], Path]) -> None:
    model = _load(tiny_model("opt"))
    assert fold_rotation(model, _plans(model, rotate=False), None).report == {}


def test_other_families_are_refused(tiny_model: Callable[[str], Path]) -> None:
    model = _load(tiny_model("opt"))
    with pytest.raises(RecipeError, match="Llama family"):
        fold_rotation(model, _plans(model, rotate=True), None)


def test_online_rotates_the_inputs_of_the_last_linear_of_each_ffn() -> None:
    model = build_model("llama")
    settings = BcqSettings(rotate=ONLINE)
    plans = {name: LayerPlan("bcq", settings) for name in block_linears(model)}
    plans["model.layers.1.mlp.down_proj"] = LayerPlan("bcq", BcqSettings(rotate=True))
    placed = placed_rotations(model, plans)
    assert [name for name in plans if placed[name] != plans[name]] == ["model.layers.0.mlp.down_proj"]
    assert placed["model.layers.0.mlp.down_proj"].settings == replace(settings, rotate_inputs=True)


def test_ffns_without_a_block_are_refused() -> None:
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=100, num_hidden_layers=1, vocab_size=320)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plans = {name: LayerPlan("bcq", BcqSettings(rotate=ONLINE)) for name in block_linears(model)}
    with pytest.raises(RecipeError, match=r"multiple of 8; that of model\.layers\.0\.mlp\.down_proj is 100"):
        placed_rotations(model, plans)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_what_is_outside_is_rotated_again_as_it_was(
    tied: bool, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    for saved in (model, tokenizer):
        saved.save_pretrained(tmp_path / "m")
    stream, _ = open_stream(str(tmp_path / "m"))
    plans = plan_layers(load_recipe("bcq-w4-g128", ("rotate=true",)), list(block_linears(stream.model)))
    states = []
    for _ in range(2):
        with stream.outside():
            rotate_outside_again(stream.model, plans)
            states.append({name: tensor.clone() for name, tensor in stream.part_tensors(None).items()})
        head, embedding = stream.model.get_output_embeddings(), stream.model.get_input_embeddings()
        assert head.weight is not embedding.weight
    assert "lm_head.weight" in states[0]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert not torch.equal(states[0]["lm_head.weight"], model.lm_head.weight)
