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

from quantkit.calibration import prefix as search
from quantkit.calibration import runner
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

PREFIX = (2, 17, 40)
PROMPT = torch.tensor([[5, 40, 100, 7, 22, 9, 80, 3]])
FP16_LOGITS_ATOL = 2e-3  # keys and values of the prefix are stored in the checkpoint's type; logits are near 1
FP32_ATOL = 1e-5  # the same sums in another order
EIGHT_BITS = ("weight_bits=8", "group_size=-1")

TinyModel = Callable[[str], Path]


@pytest.fixture(scope="module")
def calibration(tiny_model: TinyModel, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tiny llama, behind a prefix that it does not need: nothing sticks out of its texts."""
    stream, tokenizer = open_stream(str(tiny_model("llama")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "find_prefix", lambda *_: PREFIX)
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


class Unevenness:
    """In place of the texts': so much for every prefix, by how many of these tokens it holds."""

    def __init__(self, *scores: float):
        self.scores, self.judged = scores, list[tuple[int, ...]]()

    def __call__(self, _stream: Any, prefixes: Any, _texts: Tensor) -> tuple[list[float], list[list[int]]]:
        self.judged += prefixes
        held = [sum(token in PREFIX for token in tokens) for tokens in prefixes]
        return [self.scores[min(count, len(self.scores) - 1)] for count in held], [[*PREFIX, 99] for _ in prefixes]


@pytest.mark.parametrize(
    ("scores", "length"),
    [
        ((14.0, 5.0, 4.9), 1),  # a further token that gains less than a tenth is left out
        ((14.0, 5.0, 3.0, 2.5), 2),  # and one that gains less than one
        ((9.0, 6.0, 4.0, 2.0), 3),
        ((0.2, 0.0, 0.0), 0),  # a text that is even without has none
        ((0.0, 0.0), 0),
    ],
)
def test_tokens_are_taken_while_they_make_texts_evener(
    scores: tuple[float, ...], length: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, tokenizer = open_stream(str(tiny_model("llama")))
    monkeypatch.setattr(search, "_judge", Unevenness(*scores))
    windows = torch.tensor(PREFIX).repeat(4, 8)
    found = find_prefix(stream, tokenizer, windows)
    assert len(found) == length <= MOST_TOKENS
    assert set(found) <= set(PREFIX)


def test_a_model_that_needs_no_prefix_gets_none(
    tiny_model: TinyModel, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, tokenizer = open_stream(str(tiny_model("llama")))
    found = calibrate(stream, tokenizer, corpus, name="llama", windows=8, seq_len=64, seed=0, prefix=True)
    plain = calibrate(stream, tokenizer, corpus, name="llama", windows=8, seq_len=64, seed=0)
    assert (found.meta.prefix, plain.meta.prefix) == ((), None)
    save_calibration(found, tmp_path / "c.safetensors")
    assert load_calibration(tmp_path / "c.safetensors").meta.prefix == ()
    recipe, options = load_recipe("smoothquant", ("prefix=auto",)), QuantizeOptions()
    model, calibration = str(tiny_model("llama")), tmp_path / "c.safetensors"
    quantize_model(model, recipe, tmp_path / "a", calibration=calibration, options=options)
    assert "prefix: no token of the calibration sticks out by much" in capsys.readouterr().err
    quantize_model(model, load_recipe("smoothquant"), tmp_path / "b", calibration=calibration, options=options)
    assert torch.equal(_logits(_load(tmp_path / "a"), PROMPT), _logits(_load(tmp_path / "b"), PROMPT))


def test_statistics_leave_the_prefix_out(calibration: Path, tiny_model: TinyModel) -> None:
    artifact = load_calibration(calibration)
    assert artifact.meta.prefix == PREFIX
    assert artifact.windows.shape == (8, 64)
    model, ahead = _load(tiny_model("llama")), torch.tensor([PREFIX]).expand(8, -1)
    seen: list[Tensor] = []
    name = "model.layers.1.mlp.down_proj"
    module = model.get_submodule(name)
    module.register_forward_pre_hook(lambda _module, arguments: seen.append(arguments[0][:, ahead.shape[1] :]))
    _logits(model, torch.cat([ahead, artifact.windows.long()], dim=1))
    expected = seen[0].abs().amax(dim=(0, 1))
    torch.testing.assert_close(artifact.layers[name].absmax, expected, rtol=1e-4, atol=1e-6)
    assert artifact.layers[name].tokens == 8 * 64
