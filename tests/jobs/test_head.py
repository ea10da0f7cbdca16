"""A quantized head: what is stored, what stays, and that the rest of the program takes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

import quantkit
from quantkit.checkpoint.summary import summarize
from quantkit.errors import RecipeError
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.jobs.search import search_settings
from quantkit.methods import head_spec
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import load_recipe, parse_recipe
from tests.cli.calls import run

TinyModel = Callable[[str], Path]
BITS = 6
# Half a step of 63 over a range of about six deviations: (6 / 63)^2 / 12.
WEIGHT_ERROR = 1e-3


def quantized(source: Path, out: Path, *settings: str) -> Any:
    recipe = load_recipe("bcq-w4-g128-head6", settings)
    return quantize_model(str(source), recipe, out, calibration=None, options=QuantizeOptions())


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "mixtral"])
def test_head_is_a_tensor_of_its_own_and_the_embedding_stays(
    family: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    original: Any = load_model(str(tiny_model(family)))[0]
    result = quantized(tiny_model(family), tmp_path / "q")
    assert result.report["layers"]["lm_head"]["weight_error"] < WEIGHT_ERROR
    model: Any = quantkit.load(str(tmp_path / "q"), dtype=torch.float32)
    head = model.get_output_embeddings()
    assert isinstance(head, QuantizedLinear)
    assert head.spec == head_spec(BITS)
    assert not model.config.tie_word_embeddings
    embedding = original.get_input_embeddings().weight
    stored = model.get_input_embeddings().weight
    assert torch.equal(stored, embedding.to(original.dtype).float())
    weight = original.get_output_embeddings().weight.detach()
    assert float((head.dequantize() - weight).detach().norm() / weight.norm()) < WEIGHT_ERROR**0.5
    ids = torch.randint(10, 300, (1, 12), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model(ids).logits, hidden @ head.dequantize().T, rtol=1e-5, atol=1e-5)


def test_rows_are_quantized_in_parts_with_the_same_bytes(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(tiny_model("llama"), tmp_path / "whole")
    monkeypatch.setattr("quantkit.jobs.quantize_blocks.HEAD_ROWS", 100)
    quantized(tiny_model("llama"), tmp_path / "parts")
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    with safe_open(whole, "pt") as first, safe_open(parts, "pt") as second:
        for name in list(first.keys()):
            assert torch.equal(first.get_tensor(name), second.get_tensor(name)), name


def test_scales_of_the_head_keep_their_type_beside_other_floats(tmp_path: Path, tiny_model: TinyModel) -> None:
    quantized(tiny_model("llama"), tmp_path / "q")
    with safe_open(tmp_path / "q" / "model.safetensors", "pt") as file:
        assert file.get_tensor("lm_head.scales").dtype == torch.float16
        assert file.get_tensor("model.embed_tokens.weight").dtype == load_model(str(tiny_model("llama")))[0].dtype


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_dry_run_says_the_bytes_of_the_head(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    command = ["quantize", tiny_model(family), "--recipe", "bcq-w4-g128-head8", "-o", tmp_path / "q"]
    assert run(*command, "--dry-run", "--json", tmp_path / "dry.json").exit_code == 0
    promised = json.loads((tmp_path / "dry.json").read_text())
    assert run(*command).exit_code == 0
    found = summarize(tmp_path / "q")
    assert promised["files"] == found.bytes
    assert {layer["name"]: layer["bytes"] for layer in promised["layers"]} == {
        one.name: one.bytes for one in found.layers
    }
    assert "lm_head" not in found.ignore
    assert [layer.weight_bits for layer in found.layers if layer.name == "lm_head"] == [8]


def test_run_that_was_cut_short_goes_on_with_the_same_bytes(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantkit.jobs import quantize_blocks

    quantized(tiny_model("llama"), tmp_path / "whole")
    original = quantize_blocks._quantize_block

    def cut_short(job: Any, index: int, *rest: Any) -> None:
        if index == 1:
            raise KeyboardInterrupt
        original(job, index, *rest)

    monkeypatch.setattr(quantize_blocks, "_quantize_block", cut_short)
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny_model("llama"), tmp_path / "cut")
    monkeypatch.setattr(quantize_blocks, "_quantize_block", original)
    quantized(tiny_model("llama"), tmp_path / "cut")
    whole, cut = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    assert whole == cut


def test_headless_model_loads(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantized(tiny_model("llama"), tmp_path / "q")
    body: Any = AutoModel.from_pretrained(tmp_path / "q")
    assert isinstance(body.layers[0].mlp.up_proj, QuantizedLinear)


def test_generate_and_perplexity_take_it(tiny_model: TinyModel, text_file: Path, tmp_path: Path) -> None:
    quantized(tiny_model("llama"), tmp_path / "q")
    done = run("generate", tmp_path / "q", "--prompt", "the model", "--max-new-tokens", 4)
    assert done.exit_code == 0, done.stderr
    done = run("eval", "perplexity", tmp_path / "q", "--text", text_file, "--seq-len", 64, "--max-windows", 2)
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize("value", [0, 9, 6.0, True, "six"])
def test_impossible_bits_are_refused(value: Any) -> None:
    document = {"schema": 1, "method": "bcq", "head_bits": value}
    with pytest.raises(RecipeError, match="head_bits is"):
        parse_recipe(document, name="test", where="test")


def test_head_bits_survive_the_recipe_in_the_report(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantized(tiny_model("opt"), tmp_path / "q", "head_bits=8")
    recipe = json.loads((tmp_path / "q" / "quantkit.json").read_text())["recipe"]
    recipe.pop("name")
    assert parse_recipe(recipe, name="again", where="again").head_bits == 8


def test_search_refuses_it() -> None:
    with pytest.raises(RecipeError, match="no matter of the search"):
        search_settings(["head_bits=6"])
