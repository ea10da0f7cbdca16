"""``quantkit report`` and ``quantkit compare`` from the outside."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.calls import refusal, run
from tests.pipeline import quantize_tiny
from tests.report import documents


@pytest.fixture
def checkpoints(tiny_model: Callable[[str], Path], tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "q4", tmp_path / "q2"]
    for folder, bits in zip(folders, (4, 2), strict=True):
        quantize_tiny(tiny_model("opt"), folder, "bcq-w4-g128", f"weight_bits={bits}")
    return [tiny_model("opt"), *folders]


def test_compare_measures_every_model(checkpoints: list[Path], text_file: Path, tmp_path: Path) -> None:
    out, html = tmp_path / "c.json", tmp_path / "c.html"
    options = ("--text", text_file, "--seq-len", "64", "--max-windows", "2", "--json", out, "--html", html)
    result = run("compare", *checkpoints, *options)
    assert result.exit_code == 0, result.stderr
    original, q4, q2 = json.loads(out.read_text())["rows"]
    assert original["divergence"]["mean_kl"] == 0
    assert 0 < q4["divergence"]["mean_kl"] < q2["divergence"]["mean_kl"]
    assert (original["label"], q4["label"], q2["label"]) == ("float32", "bcq q4 g32", "bcq q2 g32")
    assert original["bits_per_weight"] == 32
    assert q4["bits_per_weight"] == 4 + 16 * 5 / 32
    assert original["bytes"] > q4["bytes"] > q2["bytes"] == (tmp_path / "q2" / "model.safetensors").stat().st_size
    assert all(row["milliseconds_per_token"] > 0 for row in (original, q4, q2))
    for page in (result.stdout, html.read_text()):
        for row in (original, q4, q2):
            assert f"{row['divergence']['perplexity']:.3f}" in page
            assert f"{row['milliseconds_per_token']:.2f}" in page
    report = run("report", tmp_path, "-o", tmp_path / "r.html")
    assert report.exit_code == 0, report.stderr
    assert "Perplexity against compression ratio" in (tmp_path / "r.html").read_text()


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_compare_runs_tasks(checkpoints: list[Path], text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "piqa").mkdir()
    rows = [{"goal": "the model", "sol1": "reads", "sol2": "says", "label": k % 2} for k in range(4)]
    (tmp_path / "piqa" / "valid_labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--text", text_file, "--seq-len", "64", "--max-windows", "1", "--tasks", "piqa", "--data-dir", tmp_path)
    result = run("compare", *checkpoints[:2], *options)
    assert result.exit_code == 0, result.stderr
    assert "piqa acc" in result.stdout
    assert "0.5000" in result.stdout


def test_compare_refuses_in_one_line(checkpoints: list[Path], text_file: Path, tmp_path: Path) -> None:
    one, other = checkpoints[:2]
    assert "two or more different models" in refusal("compare", one, "--text", text_file)
    assert "two or more different models" in refusal("compare", one, one, "--text", text_file)
    assert "no such file" in refusal("compare", one, other, "--text", "none.txt")
    assert "no such folder" in refusal("compare", one, "/none/model", "--text", text_file)
    assert "--html" in refusal("compare", one, other, "--text", text_file, "--html", tmp_path / "none" / "c.html")


def test_report_of_a_plan_and_its_refusals(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("schema: 1")
    documents.write(tmp_path / "plan.json", documents.search_document())
    out, plot = tmp_path / "r.html", tmp_path / "r.png"
    result = run("report", tmp_path / "plan.yaml", "-o", out, "--plot", plot)
    assert result.exit_code == 0, result.stderr
    assert f"wrote {out}" in result.stdout
    assert f"wrote {plot}" in result.stdout
    assert "no such file" in refusal("report", tmp_path / "none", "-o", out)
    assert "suffix .html" in refusal("report", tmp_path, "-o", tmp_path / "r.txt")
