"""Errors of layers, each from the original's inputs, beside those of the first recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.errors import EvaluationError
from scripts.quality import layer_errors


def _arguments(model: Path, text: Path, document: Path, *recipes: str) -> list[str]:
    sizes = ["--windows", "6", "--seq-len", "16", "--every", "3"]
    files = [str(model), "--calibration-text", str(text), "--json", str(document)]
    return ["layer_errors.py", *files, *sizes, "--recipes", *recipes]


def test_rows_stand_beside_the_first_recipe(
    tiny_model: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipes = ["best-2bit+group_size=32", "best-4bit+group_size=32"]
    arguments = _arguments(tiny_model("llama"), text_file, tmp_path / "e.json", *recipes)
    monkeypatch.setattr(sys, "argv", arguments)
    layer_errors.main()
    first, second = json.loads((tmp_path / "e.json").read_text())["rows"]
    assert first["ratio"] == 1
    assert first["errors"].keys() == second["errors"].keys()
    ratios = [
        b / a for name in first["errors"] for a, b in zip(first["errors"][name], second["errors"][name], strict=True)
    ]
    assert second["ratio"] == pytest.approx(sum(ratios) / len(ratios))
    assert second["ratio"] < 0.2  # a sixteenth for two bits more, about
    assert "| best-4bit+group_size=32 | " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--every", "2"])
    with pytest.raises(EvaluationError, match="name another file"):
        layer_errors.main()


def test_an_error_is_that_of_the_outputs_over_the_outputs() -> None:
    torch.manual_seed(0)
    weight, other, x = torch.randn(5, 8), torch.randn(5, 8), torch.randn(100, 8)
    expected = (x @ (weight - other).t()).square().sum() / (x @ weight.t()).square().sum()
    assert layer_errors.relative_error(weight, other, x.t() @ x) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("recipe", ["flatten-o1", "best-2bit+rotate=true", "bcq-w4-g128"])
def test_recipes_that_cannot_be_compared_are_refused(
    recipe: str, tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", _arguments(tiny_model("llama"), text_file, tmp_path / "e.json", recipe))
    with pytest.raises(EvaluationError, match="its own Hessian"):
        layer_errors.main()
    assert not (tmp_path / "e.json").exists()
