from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from quantkit.cli.app import app
from tests.pipeline import FAMILIES, quantize_tiny

TinyModel = Callable[[str], Path]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result: Result, *needles: str) -> None:
    """One line on stderr that holds every needle, exit code 2, nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    for needle in needles:
        assert needle in result.stderr


def edit_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def own_model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "own"))


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrate_quantize_inspect_evaluate(
    family: str, tiny_model: TinyModel, text_file: Path, tmp_path: Path
) -> None:
    model, artifact, out = tiny_model(family), tmp_path / "calibration.safetensors", tmp_path / "out"
    text = ["--text", text_file, "--seq-len", 32]
    assert run("calibrate", model, *text, "--windows", 4, "-o", artifact).exit_code == 0
    made = run("quantize", model, "--recipe", "bcq-w3-g128", "--calibration", artifact, "-o", out)
    assert made.exit_code == 0, made.stderr
    seen = run("inspect", out, "--json", tmp_path / "inspect.json")
    assert seen.exit_code == 0, seen.stderr
    summary = json.loads((tmp_path / "inspect.json").read_text())
    assert {layer["method"] for layer in summary["layers"]} == {"bcq"}
    assert all(0 < layer["measured"]["output_error"] < 0.1 for layer in summary["layers"])
    assert summary["calibration"]["tokens"] == 128
    scored = run("eval", "perplexity", out, *text, "--max-windows", 2, "--json", tmp_path / "perplexity.json")
    assert scored.exit_code == 0, scored.stderr
    assert json.loads((tmp_path / "perplexity.json").read_text())["windows"] == 2


def test_result_is_printed_and_written_as_json(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    result = run("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", tmp_path / "out", "--json", path)
    numbers = json.loads(path.read_text())
    assert result.exit_code == 0
    assert f"{numbers['bits_per_weight']:.3f}" in result.stdout
    assert numbers["layers"] == len(numbers["per_layer"]) == 12


def test_same_input_gives_the_same_bytes(tiny_model: TinyModel, tmp_path: Path) -> None:
    for name in ("first", "second"):
        quantize_tiny(tiny_model("llama"), tmp_path / name)
    for file in ("model.safetensors", "config.json", "quantkit.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_stored_dtype_of_unquantized_weights_is_kept(own_model: Path, tmp_path: Path) -> None:
    def to_half(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    edit_weights(own_model, to_half)
    config = json.loads((own_model / "config.json").read_text()) | {"dtype": "float16"}
    (own_model / "config.json").write_text(json.dumps(config))
    quantize_tiny(own_model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.float16


def test_overwrite_replaces_only_a_checkpoint(tiny_model: TinyModel, tmp_path: Path) -> None:
    command = ["quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", tmp_path / "out"]
    assert run(*command).exit_code == 0
    refused(run(*command), "not empty", "--overwrite")
    assert run(*command, "--overwrite").exit_code == 0
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").write_text("work of years")
    refused(run(*command[:-1], tmp_path / "precious", "--overwrite"), "no quantkit checkpoint")
    assert (tmp_path / "precious" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "needles"),
    [
        (["--recipe", "bcq-w5"], ["recipe 'bcq-w5'", "bcq-w4-g128"]),
        (["--recipe", "bcq-w4-g128", "--set", "group_size=100"], ["group_size is 100", "multiple of 8"]),
        (["--recipe", "bcq-w4-g128", "--set", "weight_bits=9"], ["weight_bits is 9", "1 to 8"]),
        (["--recipe", "bcq-w4-g128", "--set", "grup_size=64"], ["did you mean 'group_size'"]),
        (["--recipe", "bcq-w4-g128", "--calibration", "missing.safetensors"], ["missing.safetensors"]),
        (["--recipe", "bcq-w4-g128", "--json", "no/such/folder/x.json"], ["--json", "does not exist"]),
    ],
    ids=["recipe", "group", "bits", "key", "calibration", "json"],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    arguments: list[str], needles: list[str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    refused(run("quantize", tiny_model("llama"), "-o", tmp_path / "out", *arguments), *needles)
    assert not list(tmp_path.iterdir())


def test_missing_model_is_refused(tmp_path: Path) -> None:
    refused(run("quantize", "./no-such-model", "--recipe", "bcq-w4-g128", "-o", tmp_path / "out"), "no-such-model")


def test_quantized_model_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantize_tiny(tiny_model("llama"), tmp_path / "once")
    again = run("quantize", tmp_path / "once", "--recipe", "bcq-w4-g128", "-o", tmp_path / "twice")
    refused(again, "quantized already")


def test_calibration_of_another_model_is_refused(tiny_model: TinyModel, text_file: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "other.safetensors"
    run("calibrate", tiny_model("opt"), "--text", text_file, "--seq-len", 32, "--windows", 2, "-o", artifact)
    command = ["quantize", tiny_model("llama"), "--recipe", "bcq-w4-g128", "--calibration", artifact]
    refused(run(*command, "-o", tmp_path / "out"), "another model")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_weights_that_are_no_numbers_are_refused_by_name(value: float, own_model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(own_model, lambda tensors: tensors[name].view(-1)[3].fill_(value))
    result = run("quantize", own_model, "--recipe", "bcq-w4-g128", "-o", tmp_path / "out")
    refused(result, "model.layers.1.mlp.up_proj", "NaN or Inf")
    assert not (tmp_path / "out").exists()


def test_output_inside_a_missing_folder_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    result = run("quantize", tiny_model("llama"), "--recipe", "bcq-w4-g128", "-o", tmp_path / "a" / "b")
    refused(result, "does not exist")


def test_failure_while_writing_leaves_nothing(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerBase

    def no_space(*arguments: object, **keywords: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", no_space)
    refused(
        run("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", tmp_path / "out"), "No space left on device"
    )
    assert not list(tmp_path.iterdir())
