"""Plans and uniform recipes stand in one document, and a plan that is there is measured, not searched for again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.quality import searched


def test_a_plan_and_what_the_search_says_of_it_stand_beside_uniform_recipes(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, text = tmp_path / "s.json", str(text_file)
    arguments = [str(tiny_model("llama")), "--text", text, "--calibration-text", text, "--windows", "4"]
    arguments += [
        "--bits",
        "2,3",
        "--groups",
        "32",
        "--set",
        "measure=0",
        "--set",
        "rounds=2",
        "--max-bpw",
        "4.5",
        "--seq-len",
        "16",
    ]
    arguments += ["--max-windows", "2", "--json", str(document)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(searched, "SEQ_LEN", 16)
    monkeypatch.setattr(sys, "argv", ["searched.py", *arguments, "--uniform", "bcq-w3-g128+group_size=32"])
    searched.main()
    plan, uniform = json.loads(document.read_text())["rows"]
    assert (plan["recipe"], uniform["recipe"]) == ("search:4.5", "bcq-w3-g128+group_size=32")
    assert plan["bits_per_weight"] <= 4.5
    assert sum(plan["layers"].values()) == 14
    assert plan["search_seconds"] > 0

    document.unlink()
    searched.main()
    again, _ = json.loads(document.read_text())["rows"]
    assert "search_seconds" not in again
    assert {key: again[key] for key in ("predicted_kl", "layers")} == {
        key: plan[key] for key in ("predicted_kl", "layers")
    }
