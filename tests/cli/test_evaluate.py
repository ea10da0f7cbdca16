"""``quantkit eval perplexity`` from the outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.calls import refusal, run


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
