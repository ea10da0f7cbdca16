"""The gradients that a calibration keeps, and what recipes with hessian: end_loss make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibration import runner
from quantkit.calibration.artifact import Calibration, load_calibration, merge, save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import Corpus
from quantkit.errors import CalibrationError, ModelError
from quantkit.formats.table import dequantize
from quantkit.jobs.solve_layers import solve_layer
from quantkit.methods import METHODS, LayerPlan
from quantkit.models.families import block_linears
from quantkit.models.gradients import sampled_loss
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.quantizers.base import LayerInput
from tests.cli.calls import refusal, run
from tests.jobs.test_resume import cut_short, folder_content, interrupt

TinyModel = Callable[[str], Path]
GROUPS = 3  # does not divide the 64 or 72 channels
BF16_RTOL = 2.0**-8  # half a step of bf16, and fp32 sums in another order
QUICK = ("--recipe", "bcq-w4-g128-comp", "--set", "rounds=2", "--set", "sweeps=1")
END_LOSS = (*QUICK, "--set", "hessian=end_loss")


def _calibration(model: Any, tokenizer: Any, corpus: Corpus, **options: Any) -> Calibration:
    stream = in_memory_stream(model)
    found = calibrate(stream, tokenizer, corpus, name="tiny", windows=3, seq_len=32, seed=0, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_saliency_is_the_mean_square_of_gradients_by_group(family: str, tiny_model: TinyModel, corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model(family)))
    found = _calibration(model, tokenizer, corpus, saliency=GROUPS)
    linears = block_linears(model)
    assert list(found.saliency) == list(linears)
    assert found.meta.saliency == GROUPS
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    for name, module in linears.items():

        def watch(_module: Any, _arguments: Any, output: torch.Tensor, name: str = name) -> None:
            output.register_hook(lambda gradient: gradients[name].append(gradient.reshape(-1, gradient.shape[-1])))

        module.register_forward_hook(watch)
    for number, window in enumerate(found.windows):
        sampled_loss(model(window[None].long(), use_cache=False).logits[0], number).backward()
    for name in linears:
        square = torch.cat(gradients[name]).square()
        expected = torch.stack([part.mean(dim=1) for part in square.tensor_split(GROUPS, dim=1)], dim=1)
        assert found.saliency[name].dtype == torch.bfloat16
        torch.testing.assert_close(found.saliency[name].float(), expected, rtol=BF16_RTOL, atol=1e-12)


def test_saliency_behind_a_prefix_counts_the_text_alone(
    tiny_model: TinyModel, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    monkeypatch.setattr(runner, "find_prefix", lambda *_: (2, 17))
    found = _calibration(model, tokenizer, corpus, saliency=1, prefix=True)
    assert found.meta.prefix == (2, 17)
    assert all(weights.shape == (3 * 32, 1) for weights in found.saliency.values())


def test_the_file_keeps_saliency(tiny_model: TinyModel, corpus: Corpus, tmp_path: Path) -> None:
    model, tokenizer = load_model(str(tiny_model("opt")))
    found = _calibration(model, tokenizer, corpus, saliency=2)
    save_calibration(found, tmp_path / "c.safetensors")
    read = load_calibration(tmp_path / "c.safetensors")
    assert read.meta == found.meta
    assert all(torch.equal(read.saliency[name], weights) for name, weights in found.saliency.items())
    negative = dict(found.saliency)
    negative[next(iter(negative))] = -next(iter(negative.values()))
    save_calibration(replace(found, saliency=negative), tmp_path / "damaged.safetensors")
    with pytest.raises(CalibrationError, match="saliency holds values from -"):
        load_calibration(tmp_path / "damaged.safetensors")


def test_merging_joins_saliency_and_refuses_other_groups(tiny_model: TinyModel, corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("opt")))
    first = _calibration(model, tokenizer, corpus, saliency=2)
    second = replace(first, windows=first.windows.flip(1))
    merged = merge(first, second)
    assert merged.meta.saliency == 2
    for name, weights in first.saliency.items():
        assert torch.equal(merged.saliency[name], torch.cat([weights, weights]))
    with pytest.raises(CalibrationError, match="`saliency` of 2 and of 0 groups"):
        merge(first, replace(second, meta=replace(second.meta, saliency=0), saliency={}))


@pytest.mark.parametrize(("method", "settings"), [("bcq", {}), ("rtn", {"scale_bits": 8})])
def test_groups_of_rows_are_solved_by_their_own_hessians(method: str, settings: dict[str, Any]) -> None:
    weight, inputs = torch.randn(7, 40), torch.randn(2, 90, 40) * torch.rand(2, 1, 40)
    hessians = inputs.mT @ inputs / 90
    options = METHODS[method].settings(weight_bits=3, group_size=16, compensate=True, hessian="end_loss", **settings)
    plan = LayerPlan(method, options)
    whole = solve_layer(LayerInput("layer", weight, hessian=hessians), plan)
    expected = [
        dequantize(METHODS[method].quantize(LayerInput("layer", weight[span], hessian=hessian), options))
        for span, hessian in zip((slice(0, 4), slice(4, 7)), hessians, strict=True)
    ]
    assert whole.shape == (7, 40)
    assert torch.equal(dequantize(whole), torch.cat(expected))
    assert 0 < whole.report["weight_error"] < 1


def _artifact(model: Path, text_file: Path, out: Path, *more: str) -> list[str | Path]:
    return ["calibrate", model, "--text", text_file, "--seq-len", "32", "--windows", "4", "-o", out, *more]


@pytest.fixture(scope="module")
def whole(tiny_model: TinyModel, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of llama with gradients by two groups, made in one go."""
    path = tmp_path_factory.mktemp("whole") / "whole.safetensors"
    assert run(*_artifact(tiny_model("llama"), text_file, path, "--saliency", "2")).exit_code == 0
    return path


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_calibrating_goes_on_to_the_same_bytes(
    pieces: int, tiny_model: TinyModel, text_file: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks: two pieces forwards, two backwards."""
    parts = tmp_path / "parts.safetensors"
    with monkeypatch.context() as patch:
        cut_short(patch, pieces, interrupt)
        run(*_artifact(tiny_model("llama"), text_file, parts, "--saliency", "2"))
    assert not parts.exists()
    again = run(*_artifact(tiny_model("llama"), text_file, parts, "--saliency", "2"))
    assert f"{pieces} pieces are finished" in again.stderr
    assert parts.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["parts.safetensors"]


@pytest.mark.parametrize("more", [(), ("--set", "rotate=true")], ids=["as_it_is", "rotated"])
def test_quantizing_by_the_end_loss_goes_on_to_the_same_bytes(
    more: tuple[str, ...], tiny_model: TinyModel, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["quantize", tiny_model("llama"), *END_LOSS, *more, "--calibration", whole]
    assert run(*command, "-o", tmp_path / "whole").exit_code == 0
    with monkeypatch.context() as patch:
        cut_short(patch, 2, interrupt)
        run(*command, "-o", tmp_path / "parts")
    assert run(*command, "-o", tmp_path / "parts").exit_code == 0
    assert folder_content(tmp_path / "parts") == folder_content(tmp_path / "whole")
    plain = ["quantize", tiny_model("llama"), *QUICK, *more, "--calibration", whole]
    assert run(*plain, "-o", tmp_path / "plain").exit_code == 0
    other = folder_content(tmp_path / "plain")
    assert other["model.safetensors"] != folder_content(tmp_path / "whole")["model.safetensors"]
    assert '"saliency": 2' in (tmp_path / "whole" / "quantkit.json").read_text()


def test_models_that_take_no_saliency_are_refused(tiny_model: TinyModel, corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("mixtral")))
    with pytest.raises(ModelError, match="has experts, whose tokens change"):
        _calibration(model, tokenizer, corpus, saliency=1)
    model, tokenizer = load_model(str(tiny_model("opt")))
    with pytest.raises(ModelError, match="64 output channels, fewer than `saliency` 65"):
        _calibration(model, tokenizer, corpus, saliency=65)


def test_a_recipe_by_the_end_loss_without_gradients_is_refused(
    tiny_model: TinyModel, calibrated: Callable[[str], Path], tmp_path: Path
) -> None:
    command = ["quantize", tiny_model("llama"), *END_LOSS, "--calibration", calibrated("llama"), "-o", tmp_path / "q"]
    assert "hessian: end_loss needs a calibration with the gradients of" in refusal(*command)
    command = ["quantize", tiny_model("llama"), "--recipe", "bcq-w4-g128", "--set", "hessian=end_loss"]
    assert "set compensate: true, or leave hessian out" in refusal(*command, "-o", tmp_path / "q")
    command = ["quantize", tiny_model("llama"), "--recipe", "gptq-w4-g128", "--set", "hessian=loss"]
    assert "hessian is 'loss'; choose activations or end_loss" in refusal(*command, "-o", tmp_path / "q")
    assert not list(tmp_path.iterdir())
