"""A key/value prefix: the same as its tokens in front of the text, wherever the checkpoint is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from quantkit.calibration.artifact import load_calibration, save_calibration
from quantkit.calibration.prefix import MOST_TOKENS, find_prefix
from quantkit.calibration.runner import calibrate
from quantkit.checkpoint.config import config_from_json
from quantkit.data.corpora import Corpus
from quantkit.errors import CalibrationError, CheckpointError, ModelError, RecipeError
from quantkit.exchange.exported import opened_checkpoint
from quantkit.integrations.transformers import load_checkpoint
from quantkit.jobs.quantize import QuantizeOptions, expect, open_job, quantize_model
from quantkit.jobs.serve import serve_command
from quantkit.models.loading import open_stream
from quantkit.recipe import load_recipe, parse_recipe
from quantkit.runtime.generation import generate

PROMPT = torch.tensor([[5, 40, 100, 7, 22, 9, 80, 3]])
FP16_LOGITS_ATOL = 2e-3  # keys and values of the prefix are stored in the checkpoint's type; logits are near 1
FP32_ATOL = 1e-5  # the same sums in another order
EIGHT_BITS = ("weight_bits=8", "group_size=-1")

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def calibration(tiny_model: TinyModel, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny llama, behind a prefix."""
    stream, tokenizer = open_stream(str(tiny_model("llama")))
    result = calibrate(stream, tokenizer, corpus, name="llama", windows=8, seq_len=64, seed=0, prefix=True)
    path = tmp_path_factory.mktemp("prefix") / "c.safetensors"
    save_calibration(result, path)
    return path


@pytest.fixture(scope="module")
def checkpoint(tiny_model: TinyModel, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny llama, smoothed and quantized behind the prefix."""
    out = tmp_path_factory.mktemp("prefix") / "out"
    recipe = load_recipe("smoothquant", ("prefix=auto",))
    quantize_model(str(tiny_model("llama")), recipe, out, calibration=calibration, options=QuantizeOptions())
    return out


def _tokens(checkpoint: Path) -> tuple[int, ...]:
    document = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    prefix = config_from_json(document).prefix
    assert prefix is not None
    return prefix.tokens


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, **options).logits
    return logits


def _with_prefix_in_text(model: Any, tokens: tuple[int, ...]) -> Tensor:
    """Logits behind the tokens of the prefix, which stand in the text instead."""
    model.set_attn_implementation("sdpa")
    ids = torch.cat([torch.tensor([tokens]), PROMPT], dim=1)
    return _logits(model, ids)[:, len(tokens) :]


def test_stored_prefix_equals_its_tokens_in_front_of_the_text(
    tiny_model: TinyModel, tmp_path: Path, calibration: Path
) -> None:
    recipe = load_recipe("rtn-w4-g128", (*EIGHT_BITS, "prefix=auto", "keep=['*layers.0.*','*self_attn*','lm_head']"))
    model = str(tiny_model("llama"))
    quantize_model(model, recipe, tmp_path / "out", calibration=calibration, options=QuantizeOptions())
    loaded = _load(tmp_path / "out")
    behind = _logits(loaded, PROMPT)
    alone = _logits(_load(tiny_model("llama")), PROMPT)
    expected = _with_prefix_in_text(loaded, _tokens(tmp_path / "out"))
    # Only the last block's FFN is quantized, so that the tokens' keys and values are the original model's here too.
    torch.testing.assert_close(behind, expected, rtol=0, atol=FP16_LOGITS_ATOL)
    assert (behind - alone).abs().max() > 10 * FP16_LOGITS_ATOL


def test_every_runtime_gives_the_same(checkpoint: Path) -> None:
    whole = _logits(_load(checkpoint), PROMPT)
    loaded = load_checkpoint(str(checkpoint), device="cpu", dtype=torch.float32)
    torch.testing.assert_close(_logits(loaded, PROMPT), whole, rtol=0, atol=FP32_ATOL)
    with torch.no_grad():
        first = loaded(PROMPT[:, :5], use_cache=True)
        second = loaded(PROMPT[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=0, atol=FP32_ATOL)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], 1)
    mask = torch.tensor([[0] * 3 + [1] * PROMPT.shape[1]])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    behind_padding = _logits(loaded, padded, attention_mask=mask, position_ids=positions)[:, 3:]
    torch.testing.assert_close(behind_padding, whole, rtol=0, atol=FP32_ATOL)
    ours = generate(loaded, PROMPT, 6)
    theirs = loaded.generate(PROMPT, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
    assert torch.equal(ours, theirs)
    base = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = base(PROMPT).last_hidden_state
    torch.testing.assert_close(loaded.lm_head(hidden), whole, rtol=0, atol=FP32_ATOL)


def test_prefix_survives_saving(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(_logits(_load(tmp_path / "again"), PROMPT), _logits(_load(checkpoint), PROMPT))


def test_size_is_known_to_the_byte(tiny_model: TinyModel, calibration: Path, tmp_path: Path) -> None:
    recipe = load_recipe("w8a8-per-tensor", ("prefix=auto",))
    model = str(tiny_model("llama"))
    expected = expect(open_job(model, recipe, calibration, QuantizeOptions()), QuantizeOptions())
    made = quantize_model(model, recipe, tmp_path / "out", calibration=calibration, options=QuantizeOptions())
    assert made.bytes == expected.files


def test_older_versions_refuse_and_damage_is_named(checkpoint: Path) -> None:
    document = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    assert document["format_version"] == 2  # a version that knows 1 alone says to upgrade
    without = {name: value for name, value in document.items() if name != "prefix"}
    with pytest.raises(CheckpointError, match="malformed"):
        config_from_json(without)
    name = next(iter(document["prefix"]["modules"]))
    document["prefix"]["modules"][name][1] += 1
    with pytest.raises(CheckpointError, match="not as long as its tokens"):
        config_from_json(document)


def test_what_knows_no_prefix_refuses_it(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="key/value prefix"):
        serve_command(checkpoint, ())
    with pytest.raises(CheckpointError, match="key/value prefix"), opened_checkpoint(checkpoint):
        pass


def test_recipe_and_calibration_must_agree(
    tiny_model: TinyModel, calibration: Path, calibrated: TinyModel, tmp_path: Path
) -> None:
    options, model = QuantizeOptions(), str(tiny_model("llama"))
    recipe = load_recipe("smoothquant", ("prefix=auto",))
    with pytest.raises(CalibrationError, match="collected behind one"):
        quantize_model(model, recipe, tmp_path / "a", calibration=calibrated("llama"), options=options)
    with pytest.raises(CalibrationError, match="does not store"):
        quantize_model(model, load_recipe("smoothquant"), tmp_path / "b", calibration=calibration, options=options)
    with pytest.raises(ModelError, match="takes no prefix"):
        open_job(str(tiny_model("opt")), load_recipe("rtn-w4-g128", ("prefix=auto",)), None, options)
    with pytest.raises(RecipeError, match="prefix is 'yes'"):
        parse_recipe({"schema": 1, "method": "rtn", "prefix": "yes"}, "r", "r")
    with pytest.raises(RecipeError, match="exclude each other"):
        parse_recipe({"schema": 1, "method": "rtn", "prefix": "auto", "attention_bits": 8}, "r", "r")


def test_search_finds_the_token_that_keeps_the_text_even(tiny_model: TinyModel) -> None:
    stream, tokenizer = open_stream(str(tiny_model("llama")))
    model, quiet = stream.model, 17
    windows = torch.randint(20, 300, (4, 64), generator=torch.Generator().manual_seed(0))
    windows[:, ::3] = quiet
    found = find_prefix(stream, tokenizer, windows)
    assert 1 <= len(found) <= MOST_TOKENS
    assert model.config._attn_implementation != "quantkit_prefix"
    assert found == find_prefix(stream, tokenizer, windows)


def test_statistics_leave_the_prefix_out(calibration: Path, tiny_model: TinyModel) -> None:
    artifact = load_calibration(calibration)
    assert 1 <= len(artifact.meta.prefix) <= MOST_TOKENS
    assert artifact.windows.shape == (8, 64)
    model, ahead = _load(tiny_model("llama")), torch.tensor([artifact.meta.prefix]).expand(8, -1)
    seen: list[Tensor] = []
    name = "model.layers.1.mlp.down_proj"
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0][:, ahead.shape[1] :]))
    _logits(model, torch.cat([ahead, artifact.windows.long()], dim=1))
    expected = seen[0].abs().amax(dim=(0, 1))
    torch.testing.assert_close(artifact.layers[name].absmax, expected, rtol=1e-4, atol=1e-6)
    assert artifact.layers[name].tokens == 8 * 64
