"""What --dry-run promises, against what is then written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.summary import summarize
from quantkit.checkpoint.write import folder_bytes
from quantkit.jobs import estimate as module
from quantkit.jobs.expected_time import expected_seconds
from quantkit.jobs.quantize import QuantizeOptions, expect, open_job
from quantkit.recipe import load_recipe
from tests.cli.calls import refusal, run

TinyModel = Callable[[str], Path]
Calibrated = Callable[[str], Path]


# What a Linear takes is its format's doing, what stands beside the Linears the family's: each once, and the recipe
# whose bytes the data decide with experts too.
@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", "bcq-w4-g128"),
        ("llama", "bipolar-w4a8"),
        ("opt", "bcq-w4-g64-s8"),
        ("opt", "flatten-o2"),
        ("gpt2", "rtn-w4-g128"),
        ("gpt2", "flatten-o2"),
        ("mixtral", "rtn-w4-g128"),
        ("mixtral", "flatten-o2"),
    ],
)
def test_files_have_the_bytes_that_were_promised(
    recipe: str, family: str, tiny_model: TinyModel, calibrated: Calibrated, tmp_path: Path
) -> None:
    command = ["quantize", tiny_model(family), "--recipe", recipe, "--calibration", calibrated(family)]
    dry = run(*command, "-o", tmp_path / "q", "--dry-run", "--json", tmp_path / "dry.json")
    assert dry.exit_code == 0, dry.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dry.json"]
    promised = json.loads((tmp_path / "dry.json").read_text())
    assert run(*command, "-o", tmp_path / "q").exit_code == 0
    assert promised["files"] <= folder_bytes(tmp_path / "q") <= promised["most_files"]
    written = {layer.name: layer.bytes for layer in summarize(tmp_path / "q").layers}
    assert promised["layers"]
    for layer in promised["layers"]:
        assert layer["bytes"] <= written[layer["name"]] <= layer["most_bytes"]
    if recipe != "flatten-o2":  # whose bits and columns the data decide
        assert promised["files"] == promised["most_files"]
        assert str(promised["files"]) in dry.stdout


def test_too_little_memory_is_refused_before_the_work(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda _device: 1000)
    assert "of memory" in refusal("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", tmp_path / "q")
    assert not list(tmp_path.iterdir())


def test_too_little_disk_is_refused_before_the_work(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_folder: Path) -> Any:
        return type("Usage", (), {"free": 1000})

    monkeypatch.setattr("quantkit.jobs.quantize.shutil.disk_usage", full)
    message = refusal("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", tmp_path / "q")
    assert "GB are free there" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["quantize", "calibrate"])
def test_unknown_activations_are_refused(command: str, tiny_model: TinyModel, text_file: Path, tmp_path: Path) -> None:
    own = ["--recipe", "rtn-w4-g128"] if command == "quantize" else ["--text", text_file]
    out = tmp_path / ("q" if command == "quantize" else "c.safetensors")
    assert "choose fp32 or bf16" in refusal(command, tiny_model("opt"), *own, "-o", out, "--activations", "fp8")


@pytest.mark.parametrize("recipe", ["bcq-w4-g128", "bcq-w4-g128-comp", "flatten-o3", "bipolar-w4a8"])
def test_the_time_grows_with_the_layers(recipe: str, tiny_model: TinyModel, calibrated: Calibrated) -> None:
    job = open_job(str(tiny_model("opt")), load_recipe(recipe, []), calibrated("opt"), QuantizeOptions())
    one = dict(list(job.plans.items())[:1])
    whole, part = (expected_seconds(job.stream, plans, job.artifact) for plans in (job.plans, one))
    assert 0 < part < whole


def test_the_time_grows_with_the_passes_of_tuning(
    tiny_model: TinyModel, calibrated: Calibrated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.jobs.expected_time._seconds_per_operation", lambda _device: 1.0)
    monkeypatch.setattr("quantkit.jobs.expected_time._seconds_per_weight", lambda _plan, _device: 1.0)

    def seconds(*settings: str) -> float:
        job = open_job(
            str(tiny_model("opt")), load_recipe("bcq-w4-g128", settings), calibrated("opt"), QuantizeOptions()
        )
        return expected_seconds(job.stream, job.plans, job.artifact, job.tuning)

    plain, one = seconds(), seconds("tune={blocks: 1, epochs: 0}")
    assert plain < one < seconds("tune={epochs: 1}") < seconds("tune={blocks: 1, epochs: 1}")
    assert seconds("tune={blocks: 3, epochs: 0}") - plain == pytest.approx(3 * (one - plain))
    two, written = (seconds(f"tune={{epochs: 1, written: {count}}}") - seconds("tune={epochs: 1}") for count in (16, 8))
    assert two == pytest.approx(2 * written)
    assert written > seconds("tune={epochs: 1}") - plain  # as many windows again, and their writing


def test_tuning_blocks_doubles_the_hidden_states_and_holds_no_model(
    tiny_model: TinyModel, calibrated: Calibrated
) -> None:
    def expected(*settings: str) -> module.Estimate:
        recipe, options = load_recipe("bcq-w4-g128-comp", settings), QuantizeOptions()
        return expect(open_job(str(tiny_model("opt")), recipe, calibrated("opt"), options), options)

    plain, blocks = expected(), expected("tune={blocks: 2, epochs: 0}")
    both, whole = expected("tune={blocks: 2, epochs: 2}"), expected("tune={epochs: 2}")
    states = plain.disk - 2 * plain.files
    assert states > 0
    assert blocks.disk == 2 * plain.files + 2 * states
    assert whole.disk == 3 * plain.files + states
    assert both.disk == 3 * plain.files + 2 * states
    codes = expected("tune={blocks: 2, epochs: 0, block_codes: true}")
    assert plain.memory < blocks.memory < codes.memory < both.memory
    more = expected("tune={epochs: 2, written: 1000}")
    assert more.memory > whole.memory
    assert more.disk == whole.disk
    assert (blocks.tunes, both.tunes, whole.tunes) == (False, True, True)
