"""Table 5, Figure 4 and the tables of serving on several GPUs are made from what other scripts wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import BenchError
from scripts.nuqmm import several_gpus
from scripts.nuqmm.several_gpus import figure_4, merged, paper_section, serving_section, table_5

FAILED = {"error": "exit status 1"}
ENVIRONMENT = {"gpus": ["Some GPU"], "commit": "abc", "packages": {"torch": "2"}}


def result(ms: float, gigabytes: float, *, communication: float | None = None, gpus: int = 1) -> dict[str, Any]:
    shares = {} if communication is None else {"communication": {"1": communication}}
    steps = {"ms_per_step": {"1": ms}, "millijoules_per_token": {"1": 100 * ms}, "first_token_ms": {}}
    return {**steps, "model_bytes": [int(1e9 * gigabytes)] * gpus, **shares}


def document(results: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"command": "python it", "environment": ENVIRONMENT, "results": results, **more}


def linear(size: int, bits: int, us: float, baseline_us: float) -> dict[str, Any]:
    sizes = {"out_features": size, "in_features": size}
    return {**sizes, "method": f"nuqmm-q{bits}-grow", "median_us": us, "baseline_us": baseline_us}


def test_table_5_compares_with_fp16_on_the_fewest_gpus_that_hold_it() -> None:
    results = {
        "opt-66b fp16 tp2": result(20.0, 66, gpus=2),
        "opt-66b nuqmm-q4-g128 tp1": result(25.0, 37.5),
        "opt-66b nuqmm-q2-g128 tp1": FAILED,
        "opt-175b nuqmm-q2-g128 tp1": result(30.0, 50),
    }
    assert table_5(results).splitlines()[4:] == [
        "| opt-66b | q = 4 | 1 | 37.5 | 25.00 | 25.00 | 2500 | 1.25 | 33.5 | 33.5 | 0.69 |",
        "| opt-66b | fp16 | 2 | 66.0 | 20.00 | 40.00 | 2000 | 1.00 | 48.4 | 96.8 | 1.00 |",
        "| opt-175b | q = 2 | 1 | 50.0 | 30.00 | 30.00 | 3000 | - | 47.1 | 47.1 | - |",
    ]


def test_figure_4_shows_communication_and_the_papers_speed_ups() -> None:
    single = [linear(size, bits, 40.0 / (6 - bits), 40.0) for size in (4096, 8192) for bits in (4, 2)]
    cut = [{"m": 8192, "gpus": 2, "us": 32.0, "product_us": 24.0}]
    assert figure_4({"single": single, "cut": cut}).splitlines()[4:] == [
        "| 4096 | 40.0 | - | - | 20.0 (x2.00) | 10.0 (x4.00) | - | - | - | - |",
        "| 8192 | 40.0 | 32.0 (x1.25) | 25% | 20.0 (x2.00) | 10.0 (x4.00) | x1.30 | 24% | x3.15 | x4.41 |",
    ]


def test_what_is_missing_is_said() -> None:
    assert paper_section(document({})).count("Not measured.") == 2
    assert serving_section(document({"opt-30b fp16 tp1": result(1.0, 60)})) == "Not measured."


def test_serving_has_the_other_models_with_their_communication() -> None:
    results = {"opt-30b fp16 tp2": result(1, 1), "llama-2-70b fp16 tp2": result(22.0, 69, communication=0.125, gpus=2)}
    section = serving_section(document(results))
    assert section.startswith("1 x Some GPU, torch 2, commit abc.")
    assert "opt-30b" not in section
    assert "| llama-2-70b fp16 tp2 | 22.00 |" in section
    assert "| llama-2-70b fp16 tp2 | 69.00 | 2200.00 | 12% at 1 |" in section


def test_files_of_one_machine_become_one_and_a_setting_measured_again_counts() -> None:
    both = {**ENVIRONMENT, "gpus": ["Some GPU"] * 2}
    first = document({"opt-30b fp16 tp1": FAILED, "opt-66b fp16 tp2": result(1, 1)})
    second = {**document({"opt-30b fp16 tp1": result(2, 2), "opt-66b fp16 tp2": FAILED}), "environment": both}
    newer = {**ENVIRONMENT, "commit": "def"}
    figure = {"command": "python figure4", "environment": newer, "figure4": {"single": [], "cut": []}}
    whole = merged([first, second, figure])
    kept = {"opt-30b fp16 tp1": result(2, 2), "opt-66b fp16 tp2": result(1, 1)}
    assert whole["results"] == {key: {"commit": "abc", **found} for key, found in kept.items()}
    assert whole["environment"] == {**both, "commit": "abc, def"}
    assert whole["commands"] == ["python it", "python it", "python figure4"]
    assert whole["figure4"] == {"commit": "def", "single": [], "cut": []}
    again = document({"opt-30b fp16 tp2": result(3, 3)})
    assert set(merged([whole, again])["results"]) == {*kept, "opt-30b fp16 tp2"}
    assert merged([whole, again])["results"]["opt-66b fp16 tp2"]["commit"] == "abc"


def test_files_of_other_gpus_are_refused() -> None:
    other = {**document({}), "environment": {**ENVIRONMENT, "gpus": ["Another GPU"]}}
    with pytest.raises(BenchError, match="different GPUs"):
        merged([document({}), other])


def test_the_sections_of_the_documents_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "one.json"
    given.write_text(json.dumps(document({"opt-30b fp16 tp1": result(30.0, 60)})))
    arguments = ["several_gpus.py", str(given), "--json", str(tmp_path / "all.json")]
    for option, mark in (("bcq", "nuqmm-gpus"), ("serving", "serve-gpus")):
        page = tmp_path / f"{option}.md"
        page.write_text(f"before\n<!-- {mark}: begin -->\nold\n<!-- {mark}: end -->\nbehind\n")
        arguments += [f"--{option}", str(page)]
    monkeypatch.setattr(sys, "argv", arguments)
    several_gpus.main()
    written = (tmp_path / "bcq.md").read_text()
    assert "| opt-30b | fp16 | 1 | 60.0 | 30.00 | 30.00 | 3000 | 1.00 | 40.5 | 40.5 | 1.00 |" in written
    assert "old" not in written
    assert "Not measured." in (tmp_path / "serving.md").read_text()
    assert json.loads((tmp_path / "all.json").read_text())["results"]
