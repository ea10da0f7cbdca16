"""Tuning on windows that the model writes itself beside those of the calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from quantkit.calibration.artifact import load_calibration
from quantkit.calibration.drawing import WRITTEN, digest
from quantkit.checkpoint.read import read_report
from quantkit.jobs.tune import tuning_windows
from quantkit.models.loading import load_model, open_stream
from quantkit.runtime.writing import check_writes, write_windows
from quantkit.tuning.optimize import split_windows
from quantkit.tuning.settings import TuneSettings
from tests.cli.calls import refusal, run
from tests.jobs.test_resume import folder_content

Folders = Callable[[str], Path]
OWN = 24
TUNE = ("--set", "rounds=2", "--set", "group_size=32", "--set", "weight_bits=2", "--set", "tune.epochs=2")
WRITES = ("--set", f"tune.written={OWN}")


def command(tiny_model: Folders, calibrated: Folders, *more: str, family: str = "llama") -> list[str | Path]:
    arguments = ["quantize", tiny_model(family), "--recipe", "bcq-w4-g128", "--calibration", calibrated(family)]
    return [*arguments, *TUNE, *more]


def test_the_windows_are_the_calibrations_and_written_ones_mixed(tiny_model: Folders, calibrated: Folders) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")), dtype=torch.float32)
    windows = load_calibration(calibrated("llama")).windows
    found, source = tuning_windows(model, tokenizer, windows, TuneSettings(written=OWN))
    assert source is not None
    assert (source.name, source.windows) == (WRITTEN, OWN)
    assert found.dtype == windows.dtype
    assert found.shape == (len(windows) + OWN, windows.shape[1])
    drawn, rows = {tuple(row) for row in windows.tolist()}, [tuple(row) for row in found.tolist()]
    assert drawn < set(rows)
    _, held_out = split_windows(len(rows), 0.25)
    assert 0 < sum(rows[number] in drawn for number in held_out) < len(held_out)
    stream, _ = open_stream(str(tiny_model("llama")), dtype=torch.float32)
    own = write_windows(stream, tokenizer, OWN, windows.shape[1], seed=source.seed)
    assert source.sha256 == digest(own)
    assert not torch.equal(own, write_windows(stream, tokenizer, OWN, windows.shape[1], seed=0))  # as calibrate's are
    other, _ = tuning_windows(model, tokenizer, windows, TuneSettings(written=OWN, seed=1))
    assert not torch.equal(other, found)
    assert tuning_windows(model, tokenizer, windows, TuneSettings()) == (windows, None)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_checkpoint_tells_what_was_written_and_is_made_again_bit_for_bit(
    family: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    arguments = command(tiny_model, calibrated, *WRITES, family=family)
    for name in ("out", "again"):
        assert run(*arguments, "-o", tmp_path / name, "--json", tmp_path / f"{name}.json").exit_code == 0
    assert run(*command(tiny_model, calibrated, family=family), "-o", tmp_path / "plain").exit_code == 0
    report, plain = (read_report(tmp_path / name)["tuning"] for name in ("out", "plain"))
    assert report["written"] == {**report["written"], "name": WRITTEN, "windows": OWN}
    assert json.loads((tmp_path / "out.json").read_text())["tuning"] == report
    assert "written" not in plain
    assert report["before"] != plain["before"]  # of other windows
    assert folder_content(tmp_path / "out") == folder_content(tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tune.written=-1"], "written is -1; choose 0 or more"),
        (["tune={epochs: 0, blocks: 1, written: 4}"], "written is 4, but epochs is 0"),
    ],
    ids=["negative", "no-passes"],
)
def test_settings_that_cannot_be_are_refused(
    settings: list[str], message: str, tiny_model: Folders, calibrated: Folders, tmp_path: Path
) -> None:
    more = [word for setting in settings for word in ("--set", setting)]
    assert message in refusal(*command(tiny_model, calibrated, *more), "-o", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_write_is_refused_before_a_block_is_quantized(
    tiny_model: Folders, calibrated: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = type("Bare", (), {"bos_token_id": None, "eos_token_id": None})()
    opened, model = open_stream, str(tiny_model("llama"))
    monkeypatch.setattr("quantkit.jobs.quantize.open_stream", lambda *a, **k: (opened(*a, **k)[0], bare))
    message = refusal(*command(tiny_model, calibrated, *WRITES), "-o", tmp_path / "out")
    assert "no token that begins or ends a text" in message
    monkeypatch.undo()
    monkeypatch.setattr("quantkit.runtime.writing.free_bytes", lambda _device: 1000)
    message = refusal(*command(tiny_model, calibrated, *WRITES), "-o", tmp_path / "out")
    assert "writing windows takes" in message
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    stream, _ = opened(model, dtype=torch.float32)
    check_writes(stream, AutoTokenizer.from_pretrained(model), OWN, 64)  # on one that can
