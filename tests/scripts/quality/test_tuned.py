"""Rows of tuned recipes stand beside the same recipe without tuning."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import RecipeError
from quantkit.recipe import load_recipe
from scripts.quality import tuned
from tests.tiny import build_model


def test_each_recipe_has_a_row_without_and_one_with_tuning(
    tiny_model: Callable[[str], Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = tmp_path / "t.json"
    arguments = [str(tiny_model("llama")), "--texts", str(text_file), "--calibration-text", str(text_file)]
    arguments += ["--windows", "8", "--statistics-windows", "2", "--calibration-seq-len", "16", "--seq-len", "16"]
    arguments += ["--max-windows", "2", "--json", str(document), "--recipes"]
    arguments += ["bcq-w2-g64+group_size=32+tune={epochs: 2}"]
    arguments += ["bcq-w2-g64+group_size=32+tune={blocks: 2, epochs: 0}", "rtn-w4-g128+group_size=32"]
    monkeypatch.setattr(sys, "argv", ["tuned.py", *arguments])
    tuned.main()
    plain, after, blocks, other = json.loads(document.read_text())["rows"]
    assert (plain["tuning"], other["tuning"]) == (None, None)
    assert after["tuning"]["settings"]["epochs"] == 2
    assert after["tuning"]["after"] <= after["tuning"]["before"]
    assert plain["bits_per_weight"] == after["bits_per_weight"]
    assert plain["evaluations"][0]["reference_perplexity"] == after["evaluations"][0]["reference_perplexity"]
    assert len({row["evaluations"][0]["mean_kl"] for row in (plain, after, blocks)}) == 3
    assert plain["recipe"] == "bcq-w2-g64+group_size=32"
    assert blocks["tuning"]["settings"]["blocks"] == 2
    assert all(block["after"] <= block["before"] for block in blocks["tuning"]["blocks"].values())
    assert len(blocks["tuning"]["blocks"]) == 2
    table = capsys.readouterr().out
    assert "| rtn-w4-g128+group_size=32 | no |" in table
    assert table.count("| yes |") == 2


def test_recipes_that_differ_in_the_whole_models_passes_alone_share_tuned_blocks(
    tiny_model: Callable[[str], Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, blocks = tmp_path / "t.json", "bcq-w2-g64+group_size=32+tune.blocks=1+tune.batch=2"
    arguments = [str(tiny_model("llama")), "--texts", str(text_file), "--calibration-text", str(text_file)]
    arguments += ["--windows", "8", "--statistics-windows", "2", "--calibration-seq-len", "16", "--seq-len", "16"]
    arguments += ["--max-windows", "2", "--json", str(document), "--recipes"]
    again = f"{blocks}+tune.epochs=2+tune.codes=true+tune.epoch_code_rate=0.1"  # in a few steps, out of their cells
    passes = [f"{blocks}+tune.epochs=0", again, f"{blocks}+tune.epochs=2"]
    monkeypatch.setattr(sys, "argv", ["tuned.py", *arguments, *passes, f"{passes[-1]}+tune.rate=0.01"])
    tuned.main()
    _, alone, codes, stay, other = json.loads(document.read_text())["rows"]
    assert alone["tuning"]["blocks"] == codes["tuning"]["blocks"] == stay["tuning"]["blocks"]
    assert alone["tuning"]["block_seconds"] == stay["tuning"]["block_seconds"] != other["tuning"]["block_seconds"]
    assert codes["tuning"]["before"] == stay["tuning"]["before"]
    assert codes["tuning"]["passes"] != stay["tuning"]["passes"]
    assert other["tuning"]["blocks"] != stay["tuning"]["blocks"]


def test_a_recipe_that_edits_the_whole_model_is_refused() -> None:
    model = build_model("llama")
    for recipe in (load_recipe("bipolar-w4a8"), load_recipe("bcq-w4-g128", ["rotate=true"])):
        with pytest.raises(RecipeError, match="edits the whole model first"):
            tuned.quantized(recipe, model, None)
