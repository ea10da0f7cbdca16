"""What a recipe leaves in floating point is named, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import ModelError, RecipeError
from quantkit.jobs.quantize import QuantizeOptions, open_job
from quantkit.models import unquantized as module
from quantkit.models.experts import separate_experts
from quantkit.models.families import block_linears
from quantkit.models.unquantized import Unquantized, check_unquantized_weights, unquantized
from quantkit.recipe import Recipe, load_recipe
from tests.pipeline import quantize_tiny
from tests.tiny import build_model

Tiny = Callable[[str], Path]
KEEP_HEAD = Recipe("r", "bcq")


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 500)


def _left(family: str, recipe: Recipe = KEEP_HEAD) -> dict[str, Unquantized]:
    model = build_model(family)
    separate_experts(model)
    linears = [name for name in block_linears(model) if not recipe.keeps(name)]
    return {entry.name: entry for entry in unquantized(model, linears, recipe.keeps)}


def test_embeddings_positions_and_head_stay_by_habit() -> None:
    assert {name: entry.reason for name, entry in _left("opt").items()} == {
        "model.decoder.embed_tokens": "embedding",
        "model.decoder.embed_positions": "positions",
    }
    assert _left("qwen3_moe")["lm_head"].reason == "kept by the recipe"
    assert _left("gpt2")["transformer.wpe"].reason == "positions"


def test_shares_are_of_all_elements() -> None:
    model = build_model("llama")
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    assert _left("llama")["model.embed_tokens"].share == embedding / total


def test_layers_that_the_recipe_keeps_are_named_once() -> None:
    left = _left("llama", Recipe("r", "bcq", keep=("lm_head", "*.down_proj")))
    entry = left["model.layers.*.mlp.down_proj"]
    assert (entry.elements, entry.reason) == (2 * 72 * 136, "kept by the recipe")


def test_a_tower_is_one_entry_beside_the_language_model() -> None:
    assert _left("gemma3")["model.vision_tower"].reason == "beside the language model"
    assert _left("qwen2_5_vl")["model.visual"].reason == "beside the language model"


def test_gemma_3n_is_refused_until_its_table_is_kept(tiny_model: Tiny, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"embed_tokens_per_layer would stay in floating point, \d+\.\d%"):
        quantize_tiny(tiny_model("gemma3n"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    kept = 'keep=["lm_head", "*per_layer*", "*altup*"]'
    result = quantize_tiny(tiny_model("gemma3n"), tmp_path / "out", "bcq-w4-g128", kept)
    named = {entry.name: entry.reason for entry in result.unquantized}
    assert named["model.embed_tokens_per_layer"] == "kept by the recipe"


def test_a_dry_run_names_what_stays_and_refuses_what_nobody_kept(tiny_model: Tiny, tmp_path: Path) -> None:
    options = QuantizeOptions()
    with pytest.raises(RecipeError, match="embed_tokens_per_layer would stay in floating point"):
        open_job(str(tiny_model("gemma3n")), load_recipe("rtn-w4-g128"), None, options)
    job = open_job(str(tiny_model("qwen3_moe")), load_recipe("rtn-w4-g128"), None, options)
    assert {entry.name: entry.reason for entry in job.unquantized} == {
        "model.embed_tokens": "embedding",
        "lm_head": "kept by the recipe",
    }


def test_blocks_that_cannot_run_one_by_one_are_refused(calibrated: Tiny) -> None:
    with pytest.raises(ModelError, match="cannot be run block by block"):
        calibrated("gemma3n")


def test_the_largest_is_named_with_how_many_others() -> None:
    left = [Unquantized("a", 10, 0.1, None), Unquantized("b.*", 40, 0.4, None), Unquantized("c", 30, 0.3, "head")]
    with pytest.raises(RecipeError, match=r"recipe mine: b\.\* would .* 40\.0% of the model, and 1 more"):
        check_unquantized_weights(left, "mine")
    check_unquantized_weights(left[2:], "mine")
