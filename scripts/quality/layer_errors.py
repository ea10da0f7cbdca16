"""The error that quantized Linears leave in their outputs, each from the original's inputs, by recipe.

python scripts/quality/layer_errors.py MODEL --calibration-text c4.txt
    --recipes best-2bit best-2bit+group_sweeps=3 --json docs/results/layers-MODEL.json

Perplexity and KL of a small model at 2 bits move by some per cent when a sum is rounded otherwise, since every layer
answers those before it. Here every layer starts from the same inputs. Shuffled windows of the calibration text are cut
into three parts: recipes take the Hessian of the first and of the second, and errors are measured on the third. A row's
ratio is the mean over layers and parts of its error over that of the first recipe; its standard error is that of
this mean. Rows already in the JSON file are kept; they must be of the same windows and Linears.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.data.corpora import load_text
from quantkit.data.windows import shuffled_windows, tokenize
from quantkit.errors import EvaluationError
from quantkit.formats.table import dequantize
from quantkit.methods import METHODS, plan_layers
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model
from quantkit.quantizers.base import LayerInput
from quantkit.recipe import load_recipe
from scripts.common import command_line, environment_of, markdown_table, read_document, run_script, write_document

WEIGHT_ONLY = ("bcq", "rtn", "trellis")
PARTS = 3  # two to quantize by, one to measure on
BATCH = 4  # windows at once

Hessians = list[dict[str, Tensor]]
"""E[x x^T] [K, K] by layer, of each part of the text."""


@contextmanager
def adding_up(linears: dict[str, nn.Module], sums: dict[str, Tensor]) -> Iterator[None]:
    """While entered, inputs of these Linears are added up as x^T x."""

    def hook(name: str) -> Any:
        def add(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].flatten(0, -2).float()
            sums[name] = sums.get(name, torch.zeros(())) + x.t() @ x

        return add

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def hessians(model: Any, linears: dict[str, nn.Module], windows: Tensor) -> Hessians:
    """Of each third of windows [n, seq_len]."""
    found: Hessians = []
    for part in windows.chunk(PARTS):
        sums: dict[str, Tensor] = {}
        with adding_up(linears, sums):
            for batch in part.split(BATCH):
                model(batch)
        found.append({name: total / part.numel() for name, total in sums.items()})
    return found


def relative_error(weight: Tensor, quantized: Tensor, hessian: Tensor) -> float:
    """tr((W - W') H (W - W')^T) over tr(W H W^T)."""
    left = weight - quantized
    return float((left @ hessian * left).sum() / (weight @ hessian * weight).sum())


def errors(recipe: str, linears: dict[str, nn.Module], given: Hessians) -> dict[str, list[float]]:
    """By layer: the error on the last part when quantized by each of the others.

    Raises EvaluationError for a recipe that edits the model first, quantizes inputs or takes no Hessian.
    """
    name, *settings = recipe.split("+")
    plans = plan_layers(load_recipe(name, settings), list(linears))
    *known, held_out = given
    found: dict[str, list[float]] = {}
    for layer, plan in plans.items():
        method = METHODS[plan.method]
        if plan.method not in WEIGHT_ONLY or plan.settings.rotate or not method.needs_hessian(plan.settings):
            raise EvaluationError(
                f"--recipes {recipe}: only what codes a weight against its own Hessian can be compared"
            )
        weight = linear_weight(linears[layer]).detach().float()
        found[layer] = [
            relative_error(
                weight,
                dequantize(method.quantize(LayerInput(layer, weight, hessian=one[layer]), plan.settings)),
                held_out[layer],
            )
            for one in known
        ]
    return found


def row_of(recipe: str, first: str, done: dict[str, dict[str, list[float]]], seconds: float) -> dict[str, Any]:
    """One row, beside the errors of the first recipe."""
    found = done[recipe]
    ratios = [mine / its for layer in found for mine, its in zip(found[layer], done[first][layer], strict=True)]
    stderr = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
    return {
        "recipe": recipe,
        "first": first,
        "ratio": statistics.fmean(ratios),
        "ratio_stderr": stderr,
        "error": statistics.fmean(error for errors in found.values() for error in errors),
        "cpu_seconds": seconds,
        "errors": found,
        "environment": environment_of("cpu"),
        "command": command_line(),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    cells = [
        [
            row["recipe"],
            f"{row['error']:.5f}",
            row["first"],
            f"{row['ratio']:.4f} ± {row['ratio_stderr']:.4f}",
            f"{row['cpu_seconds']:.0f}",
        ]
        for row in rows
    ]
    return markdown_table(("recipe", "error", "beside", "ratio", "CPU s"), cells, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", help="how the model is called in the results; by default its folder's name")
    parser.add_argument("--calibration-text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=96, help="a third for each part")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--every", type=int, default=5, help="take every so manieth Linear")
    parser.add_argument("--recipes", nargs="+", required=True, help="the first is what others are divided by")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.windows < PARTS or options.every < 1:
        raise EvaluationError(
            f"--windows {options.windows}, --every {options.every}: at least {PARTS} and 1 are needed"
        )
    given_by = {"model": options.name or Path(options.model).name}
    given_by |= {name: getattr(options, name) for name in ("windows", "seq_len", "every")}
    document = read_document(options.json, {**given_by, "rows": []})
    if any(document.get(name) != value for name, value in given_by.items()):
        raise EvaluationError(
            f"--json {options.json}: holds rows of another model, windows or Linears; name another file"
        )
    model, tokenizer = load_model(options.model, dtype=torch.float32)
    ids = tokenize(tokenizer, load_text(None, options.calibration_text, split="train").text, name="--calibration-text")
    windows = shuffled_windows(ids, options.seq_len, options.windows, seed=0, name="--calibration-text")
    every = block_linears(model)
    linears = {name: every[name] for name in list(every)[:: options.every]}
    given = hessians(model, linears, windows)
    done = {row["recipe"]: row["errors"] for row in document["rows"]}
    for recipe in options.recipes:
        if recipe not in done:
            started = time.process_time()
            done[recipe] = errors(recipe, linears, given)
            seconds = time.process_time() - started
            document["rows"].append(row_of(recipe, options.recipes[0], done, seconds))
            write_document(options.json, document)
    print(markdown(document["rows"]))


if __name__ == "__main__":
    run_script(main)
