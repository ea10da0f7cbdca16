"""``quantkit calibrate`` from the outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.calibration.artifact import load_calibration
from tests.cli.calls import refusal, run
from tests.network import cut_network

SMALL = ("--windows", "3", "--seq-len", "64")


def test_artifact_is_written_and_described(tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    result = run("calibrate", tiny_model("opt"), "--text", text_file, *SMALL, "-o", out, "--json", tmp_path / "c.json")
    assert result.exit_code == 0, result.stderr
    assert "192 (3 windows of 64)" in result.stdout
    assert len(load_calibration(out).layers) == 12
    numbers = json.loads((tmp_path / "c.json").read_text())
    assert (numbers["layers"], numbers["windows"], numbers["seq_len"], numbers["tokens"]) == (12, 3, 64, 192)
    assert numbers["bytes"] == out.stat().st_size
    assert numbers["texts"][0]["sha256"] in result.stdout


def test_the_model_writes_windows_beside_a_text_or_alone(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    for name, arguments in (("both", ("--written", "1", "--text", text_file)), ("alone", ("--written", "3"))):
        out = tmp_path / f"{name}.safetensors"
        result = run("calibrate", tiny_model("opt"), *arguments, *SMALL, "-o", out)
        assert result.exit_code == 0, result.stderr
        assert "written by the model (sha256" in result.stdout
        assert load_calibration(out).windows.shape == (3, 64)


def test_merge_joins_two_artifacts(tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path) -> None:
    parts = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for seed, part in enumerate(parts):
        assert (
            run("calibrate", tiny_model("opt"), "--text", text_file, *SMALL, "--seed", str(seed), "-o", part).exit_code
            == 0
        )
    out = tmp_path / "c.safetensors"
    result = run("calibrate", "--merge", *parts, "-o", out)
    assert result.exit_code == 0, result.stderr
    assert load_calibration(out).meta.tokens == 384


def test_merge_of_different_models_is_refused(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    parts = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for family, part in zip(("opt", "llama"), parts, strict=True):
        assert run("calibrate", tiny_model(family), "--text", text_file, *SMALL, "-o", part).exit_code == 0
    assert "different models" in refusal("calibrate", "--merge", *parts, "-o", tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()


def test_existing_artifact_is_not_overwritten(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "c.safetensors"
    out.write_text("precious")
    assert "exists already" in refusal("calibrate", tiny_model("opt"), "--text", text_file, "-o", out)
    assert out.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MODEL", "-o", "c.bin"), "give it that suffix"),
        (("MODEL", "-o", "none/c.safetensors"), "does not exist"),
        (("MODEL", "-o", "c.safetensors"), "give either --dataset"),
        (("MODEL", "--text", "TEXT", "-o", "c.safetensors", "--json", "none/c.json"), "does not exist"),
        (("MODEL", "--text", "none.txt", "-o", "c.safetensors"), "no such file"),
        (("MODEL", "--dataset", "c5", "-o", "c.safetensors"), "known are wikitext2, c4, pydoc"),
        (("/none/model", "--dataset", "pydoc", "-o", "c.safetensors"), "no such folder"),
        (("--dataset", "pydoc", "-o", "c.safetensors"), "name a MODEL"),
        (("MODEL", "--text", "TEXT", "--windows", "9999", "--seq-len", "64", "-o", "c.safetensors"), "9999 were asked"),
        (("MODEL", "--text", "TEXT", "--seq-len", "4096", "-o", "c.safetensors"), "the model has 256 positions"),
        (("MODEL", "--written", "129", "--text", "TEXT", "-o", "c.safetensors"), "more than --windows 128"),
        (("MODEL", "--written", "128", "--text", "TEXT", "-o", "c.safetensors"), "leave the text out"),
        (("MODEL", "--written", "127", "-o", "c.safetensors"), "give either --dataset"),
        (("MODEL", "--merge", "a", "b", "-o", "c.safetensors"), "takes no model"),
        (("--merge", "a", "b", "-o", "c.safetensors"), "cannot be read"),
    ],
    ids=[
        "suffix",
        "no-folder",
        "no-text",
        "no-json-folder",
        "missing-text",
        "unknown-dataset",
        "missing-model",
        "no-model",
        "too-many-windows",
        "window-too-long",
        "more-written-than-windows",
        "text-left-over",
        "text-missing",
        "merge-and-model",
        "merge-missing",
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: tuple[str, ...],
    message: str,
    tiny_model: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {"MODEL": str(tiny_model("llama")), "TEXT": str(text_file)}
    assert message in refusal("calibrate", *(known.get(argument, argument) for argument in arguments))
    assert list(tmp_path.iterdir()) == []


def test_unreachable_hub_is_one_line(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_network(monkeypatch)
    out = tmp_path / "c.safetensors"
    assert "cannot be reached" in refusal("calibrate", tiny_model("llama"), "--dataset", "wikitext2", "-o", out)
    assert "cannot be reached" in refusal("calibrate", "some/model", "--dataset", "pydoc", "-o", out)
