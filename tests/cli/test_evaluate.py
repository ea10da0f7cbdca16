"""``quantkit eval perplexity`` from the outside."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.calls import refusal, run
from tests.pipeline import quantize_tiny


@pytest.mark.parametrize("recipe", ["gptq", "llamacpp", "strided"])
def test_numbers_are_printed_and_written(
    recipe: str, tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    options = ("--seq-len", "64", "--max-windows", "2", "--recipe", recipe, "--json", out)
    result = run("eval", "perplexity", tiny_model("gpt2"), "--text", text_file, *options)
    assert result.exit_code == 0, result.stderr
    numbers = json.loads(out.read_text())
    assert {"perplexity", "stderr", "windows", "tokens", "text_sha256", "bos"} <= numbers.keys()
    assert numbers["recipe"] == recipe
    assert numbers["windows"] == 2
    for fact in (f"{numbers['perplexity']:.4f} +/- {numbers['stderr']:.4f}", numbers["text_sha256"], numbers["bos"]):
        assert fact in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MODEL",), "give either --dataset"),
        (("MODEL", "--text", "none.txt"), "no such file"),
        (("MODEL", "--text", "TEXT", "--recipe", "gguf"), "known are gptq, llamacpp, strided"),
        (("MODEL", "--text", "TEXT", "--seq-len", "4096"), "the model has 256 positions"),
        (("MODEL", "--text", "SHORT", "--seq-len", "64"), "tokens, but one window takes 64"),
        (("/none/model", "--text", "TEXT"), "no such folder"),
        (("MODEL", "--text", "TEXT", "--json", "none/p.json"), "does not exist"),
    ],
    ids=["no-text", "missing-text", "recipe", "positions", "short-text", "missing-model", "json-folder"],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: tuple[str, ...], message: str, tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a line of text")
    known = {"MODEL": str(tiny_model("llama")), "TEXT": str(text_file), "SHORT": str(short)}
    assert message in refusal("eval", "perplexity", *(known.get(argument, argument) for argument in arguments))
    assert list(tmp_path.iterdir()) == [short]


def test_divergence_of_a_checkpoint_and_of_the_model_itself(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    model, out = tiny_model("opt"), tmp_path / "d.json"
    quantize_tiny(model, tmp_path / "q", "bcq-w2-g64")
    options = ("--text", text_file, "--seq-len", "64", "--max-windows", "2", "--json", out)
    found = {}
    for name, other in (("itself", model), ("quantized", tmp_path / "q")):
        result = run("eval", "divergence", model, other, *options)
        assert result.exit_code == 0, result.stderr
        found[name] = json.loads(out.read_text())
        assert f"{found[name]['mean_kl']:.5f} +/- {found[name]['mean_kl_stderr']:.5f}" in result.stdout
    keys = {"mean_kl", "median_kl", "p90_kl", "p99_kl", "same_top1"}
    assert {found["itself"][key] for key in keys - {"same_top1"}} == {0.0}
    assert found["itself"]["same_top1"] == 1.0
    assert found["quantized"]["p99_kl"] > found["quantized"]["median_kl"] > 0
    assert found["quantized"]["text_sha256"] == found["itself"]["text_sha256"]


def test_divergence_refuses_in_one_line(tiny_model: Callable[[str], Path], text_file: Path) -> None:
    model = tiny_model("opt")
    assert "give either --dataset" in refusal("eval", "divergence", model, model)
    assert "no such folder" in refusal("eval", "divergence", model, "/none/model", "--text", text_file)
    too_long = ("--text", text_file, "--seq-len", "4096")
    assert "the model has 256 positions" in refusal("eval", "divergence", model, model, *too_long)


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_without_the_extra_name_the_pip_line(tiny_model: Callable[[str], Path]) -> None:
    message = refusal("eval", "tasks", tiny_model("opt"), "--tasks", "piqa")
    assert "pip install 'quantkit[eval]'" in message


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_tasks_are_printed_and_written(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "piqa").mkdir()
    rows = [{"goal": "the model", "sol1": "reads", "sol2": "says", "label": k % 2} for k in range(4)]
    (tmp_path / "piqa" / "valid_labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "t.json"
    result = run("eval", "tasks", tiny_model("opt"), "--tasks", "piqa", "--data-dir", tmp_path, "--json", out)
    assert result.exit_code == 0, result.stderr
    scores = {score["metric"]: score for score in json.loads(out.read_text())["scores"]}
    assert scores["acc"]["value"] == 0.5  # the same answer to four equal questions, half of them right
    assert "0.5000" in result.stdout
