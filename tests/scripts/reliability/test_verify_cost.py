"""The cost of comparing digests is measured on loads that compare them and loads that do not."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.storage.tensors import VERIFY_VARIABLE
from scripts.reliability import verify_cost
from tests.pipeline import quantize_tiny


def test_both_kinds_of_loads_are_timed_in_turns(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "q")
    seen: list[str | None] = []
    load = verify_cost.load_checkpoint

    def counting(folder: str, **options: object) -> object:
        seen.append(os.environ.get(VERIFY_VARIABLE))
        return load(folder, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(verify_cost, "load_checkpoint", counting)
    monkeypatch.setenv(VERIFY_VARIABLE, "1")  # undone with the rest
    out = tmp_path / "cost.json"
    monkeypatch.setattr(sys, "argv", ["verify_cost.py", str(tmp_path / "q"), "--rounds", "2", "--json", str(out)])
    verify_cost.main()
    (result,) = json.loads(out.read_text())["results"]
    assert seen == ["0", "1"] * 3
    assert result["verified_seconds"] > 0
    ratio = result["verified_processor_seconds"] / result["unverified_processor_seconds"]
    assert result["cost_percent_of_processor_seconds"] == pytest.approx(100 * (ratio - 1), abs=0.5)
