"""A row of the quality tables says where and by which commands it was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.quality import table
from tests.cli.calls import run


def in_process(*arguments: str) -> float:
    """Instead of a process per command."""
    assert run(*arguments).exit_code == 0, arguments
    return 0.0


def test_rows_say_where_and_how(
    tiny_model: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A row of another machine is kept as it is; the new ones carry this one, and settings reach quantize."""
    monkeypatch.setattr(table, "CALIBRATION_SEQ_LEN", 16)
    monkeypatch.setattr(table, "run_quantkit", in_process)
    document = tmp_path / "t.json"
    score = {"perplexity": 20.0, "stderr": 1.0}
    kept = {"recipe": "original", "environment": {"device": "elsewhere"}, "evaluation": score}
    document.write_text(json.dumps({"rows": [kept]}))
    arguments = [str(tiny_model("opt")), "--name", "tiny", "--text", str(text_file), "--seq-len", "16"]
    arguments += ["--calibration-text", str(text_file), "--windows", "2", "--work", str(tmp_path / "work")]
    arguments += ["--recipes", "rtn-w4-g128+group_size=32", "--max-windows", "2", "--json", str(document)]
    arguments += ["--divergence"]
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments])
    table.main()
    first, row = json.loads(document.read_text())["rows"]
    assert first == kept
    assert row["recipe"] == "rtn-w4-g128+group_size=32"
    assert row["environment"]["device"] == "cpu"
    assert row["environment"]["commit"]
    assert row["environment"]["packages"].keys() == {"quantkit", "torch", "transformers"}
    shown = " ".join(row["quantize_command"])
    assert "quantize tiny --recipe rtn-w4-g128 --set group_size=32 --calibration c.safetensors" in shown
    assert row["bits_per_weight"] == 4 + (4 + 1) * 16 / 32
    assert not {"model", "reference", "histogram"} & {*row["evaluation"], *row["divergence"]}
    assert " ".join(row["divergence_command"]).startswith("quantkit eval divergence tiny rtn-w4-g128+group_size=32 ")
    assert row["divergence"]["mean_kl"] > 0
    assert row["evaluation"]["perplexity"] > 1
    assert f"| rtn-w4-g128+group_size=32 | {row['bits_per_weight']:.2f} |" in capsys.readouterr().out
    assert (tmp_path / "work" / "rtn-w4-g128+group_size=32" / "config.json").exists()


def test_without_a_calibration_text_nothing_is_calibrated(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "run_quantkit", in_process)
    document = tmp_path / "t.json"
    arguments = [str(tiny_model("opt")), "--name", "tiny", "--text", str(text_file), "--seq-len", "16"]
    arguments += ["--recipes", "rtn-w4-g128", "--max-windows", "2", "--json", str(document)]
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments])
    table.main()
    found = json.loads(document.read_text())
    assert "calibrate_command" not in found
    shown = "quantkit quantize tiny --recipe rtn-w4-g128 --out rtn-w4-g128"
    assert " ".join(found["rows"][1]["quantize_command"]) == shown


def test_a_prefix_has_a_calibration_of_its_own(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes with and without a prefix stand in one table, and say how many columns they add."""
    monkeypatch.setattr(table, "CALIBRATION_SEQ_LEN", 16)
    monkeypatch.setattr(table, "run_quantkit", in_process)
    document = tmp_path / "t.json"
    arguments = [str(tiny_model("llama")), "--name", "tiny", "--text", str(text_file), "--seq-len", "16"]
    arguments += ["--calibration-text", str(text_file), "--windows", "2", "--max-windows", "2", "--json", str(document)]
    arguments += ["--recipes", "flatten-o1,flatten-o1+prefix=auto"]
    monkeypatch.setattr(sys, "argv", ["table.py", *arguments])
    table.main()
    found = json.loads(document.read_text())
    assert found["calibrate_command"][-2:] == ["--out", "c.safetensors"]
    assert found["calibrate_prefix_command"][-3:] == ["--prefix", "--out", "c-prefix.safetensors"]
    _, plain, behind = found["rows"]
    assert "c.safetensors" in plain["quantize_command"]
    assert "c-prefix.safetensors" in behind["quantize_command"]
    for row in (plain, behind):
        assert 0 <= row["extended_columns"] <= row["most_extended_columns"] <= 1
