"""Quality of recipes with and without tuning, in one process and in memory: perplexity, KL and equal top tokens.

python scripts/quality/tuned.py MODEL --texts wiki.test.jsonl lambada.jsonl --calibration-text c4.txt
    --recipes bcq-w3-g128 bcq-w3-g64-s8+tune.epochs=4 --json docs/results/tuned-MODEL.json

Before the rows with tuning, of blocks (tune.blocks) or of the whole model, stands the same recipe without; neighbours
that differ in tune alone share it, and those that differ in the whole model's passes alone share their tuned blocks.
A recipe may be a file, such as the plan of a search. No checkpoint is written: the numbers are those of the stored
values. Statistics of inputs are of the first windows, as a GPU is slow at collecting them.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.artifact import Calibration
from quantkit.calibration.drawing import Written, draw_windows
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import Corpus, check_drawn, load_text
from quantkit.errors import RecipeError
from quantkit.evaluation.divergence import divergence
from quantkit.formats.table import stored_bytes
from quantkit.jobs.block_work import BlockWork
from quantkit.jobs.quantize_blocks import quantize_blocks
from quantkit.jobs.tune import tuning_windows
from quantkit.methods import plan_layers
from quantkit.models.families import block_linears
from quantkit.models.loading import load_model, stored_dtype
from quantkit.models.stream import in_memory_stream
from quantkit.recipe import Recipe, load_recipe
from quantkit.runtime.expanded_weights import expand_weights
from quantkit.runtime.writing import written_by
from quantkit.storage.resume import passing_workspace
from quantkit.tuning.settings import TuneSettings, tune_settings
from quantkit.tuning.whole_model import tune_model
from scripts.common import command_line, environment_of, markdown_table, run_script, write_document

SEQ_LEN = 512


def calibrated(options: argparse.Namespace, original: Any, tokenizer: Any) -> Calibration:
    """Statistics of the first windows, with all windows."""
    stream, seq_len = in_memory_stream(original), options.calibration_seq_len
    reads = check_drawn(None, options.calibration_text, windows=options.windows, written=options.written)
    corpus = load_text(None, options.calibration_text, split="train") if reads else None
    drawn = draw_windows(
        stream,
        tokenizer,
        corpus,
        windows=options.windows,
        seq_len=seq_len,
        seed=0,
        written=written_by(stream, tokenizer, options.written, seq_len, seed=0),
    )
    first = drawn.windows[: options.statistics_windows]
    found = calibrate(
        stream,
        tokenizer,
        None,
        name=options.model,
        windows=len(first),
        seq_len=seq_len,
        seed=0,
        written=Written(len(first), lambda: first),
    )
    assert found is not None  # of the first rank, and there is one
    return replace(found, windows=drawn.windows.to(torch.int32))


def quantized(
    recipe: Recipe,
    original: Any,
    artifact: Calibration,
    *,
    tuning: TuneSettings | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, float, dict[str, Any]]:
    """A copy of the model with its Linears quantized, on the CPU; their bits per weight; a report per tuned block.

    tuning: of each block, or None. dtype: what norms and biases would be stored in.
    Raises RecipeError for a recipe that edits the whole model first: here all of it is in memory, part after part.
    """
    model = copy.deepcopy(original)
    plans = plan_layers(recipe, list(block_linears(model)))
    if any(plan.method in ("bipolar", "flatten") or getattr(plan.settings, "rotate", False) for plan in plans.values()):
        raise RecipeError(
            f"recipe {recipe.name}: edits the whole model first; use quantkit quantize and eval divergence"
        )
    stream = in_memory_stream(model)
    work = BlockWork(stream, plans, artifact, dtype, torch.float32, attention=False, tuning=tuning)
    with passing_workspace({}) as pieces:
        done = quantize_blocks(work, pieces)
    stored = sum(8 * stored_bytes(layer.spec, layer.shape) for layer in done.stored.values())
    weights = sum(layer.shape[0] * layer.shape[1] for layer in done.stored.values())
    return model.to("cpu", torch.float32), stored / weights, done.tuned_blocks


def scores(original: Any, model: Any, tokenizer: Any, texts: list[Corpus], options: argparse.Namespace) -> list[Any]:
    """The divergence of a model from the original on each text."""
    expanded = copy.deepcopy(model)
    expand_weights(expanded)
    expanded.to(options.device)
    rows = []
    for text in texts:
        result = divergence(
            original, expanded, tokenizer, text, seq_len=options.seq_len, max_windows=options.max_windows
        )
        rows.append({key: value for key, value in asdict(result).items() if key != "histogram"})
    return rows


@dataclass
class Untuned:
    """A recipe without tuning. name: of the recipe with its settings. row: of the table. tuned: its blocks, tuned
    last."""

    name: str
    model: Any
    row: dict[str, Any]
    tuned: TunedBlocks | None = None


@dataclass(frozen=True)
class TunedBlocks:
    """A model whose blocks were tuned. settings: without those of the whole model's passes."""

    settings: TuneSettings
    model: Any
    reports: dict[str, Any]
    seconds: float


def untuned(name: str, original: Any, artifact: Calibration, context: tuple[Any, ...]) -> Untuned:
    """The model as quantized, and its row."""
    tokenizer, texts, options = context
    row: dict[str, Any] = {"recipe": name, "environment": environment_of(options.device), "command": command_line()}
    started = time.perf_counter()
    model, bits, _ = quantized(load_recipe(*_parts(name)), original, artifact)
    row |= {"bits_per_weight": bits, "quantize_seconds": time.perf_counter() - started, "tuning": None}
    return Untuned(name, model, row | {"evaluations": scores(original, model, tokenizer, texts, options)})


def tuned_blocks(
    recipe: Recipe, settings: TuneSettings, before: Untuned, original: Any, artifact: Calibration, dtype: torch.dtype
) -> TunedBlocks:
    """The recipe's blocks, tuned now or for the recipe before."""
    plain = TuneSettings()
    keys = "codes", "embeddings", "written", "epochs", "epoch_rate", "epoch_code_rate", "epoch_batch"
    of_model = {key: getattr(plain, key) for key in keys}
    own = replace(settings, **of_model)
    if before.tuned is None or before.tuned.settings != own:
        started = time.perf_counter()
        model, _, reports = quantized(recipe, original, artifact, tuning=settings, dtype=dtype)
        seconds = time.perf_counter() - started - before.row["quantize_seconds"]  # which stand for themselves
        before.tuned = TunedBlocks(own, model, reports, seconds)
    return before.tuned


def tuned_row(
    name: str,
    settings: TuneSettings,
    before: Untuned,
    *,
    original: Any,
    artifact: Calibration,
    context: tuple[Any, ...],
) -> dict[str, Any]:
    """The row of a recipe that tunes what ``before`` holds as quantized."""
    tokenizer, texts, options = context
    recipe, dtype, seconds = load_recipe(*_parts(name)), stored_dtype(options.model), 0.0
    tuning: dict[str, Any] = {"settings": asdict(settings)}
    model = before.model
    if settings.blocks:
        blocks = tuned_blocks(recipe, settings, before, original, artifact, dtype)
        model, tuning["blocks"], seconds = blocks.model, blocks.reports, blocks.seconds
        tuning["block_seconds"] = seconds
    started = time.perf_counter()
    if settings.epochs:
        model = copy.deepcopy(model)
        windows, written = tuning_windows(original, tokenizer, artifact.windows, settings)
        tuning |= {} if written is None else {"written": asdict(written)}
        tuning |= tune_model(original, model, windows, settings, dtype=dtype).to_json()
    tuning["seconds"] = seconds + time.perf_counter() - started
    evaluations = scores(original, model, tokenizer, texts, options)
    return {**before.row, "recipe": name, "tuning": tuning, "evaluations": evaluations}


def _parts(name: str) -> tuple[str, list[str]]:
    recipe, *settings = name.split("+")
    return recipe, settings


def _tuning(name: str) -> TuneSettings | None:
    """What a recipe asks for. Raises RecipeError for settings that cannot be, before the work."""
    tune = load_recipe(*_parts(name)).tune
    return None if tune is None else tune_settings(name, tune)


def _without_tuning(name: str) -> str:
    recipe, settings = _parts(name)
    return "+".join([recipe, *(setting for setting in settings if not setting.startswith("tune"))])


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, a group of four columns per text."""
    texts = [score["text"] for score in rows[0]["evaluations"]]
    heads = [f"{text}: {kind}" for text in texts for kind in ("perplexity", "mean KL", "99 % KL", "same top token")]
    lines = []
    for row in rows:
        seconds = row["quantize_seconds"] + (row["tuning"]["seconds"] if row["tuning"] else 0)
        cells = [row["recipe"], "yes" if row["tuning"] else "no", f"{row['bits_per_weight']:.2f}", f"{seconds:.0f}"]
        for score in row["evaluations"]:
            cells += [f"{score['perplexity']:.2f}", f"{score['mean_kl']:.4f}", f"{score['p99_kl']:.3f}"]
            cells.append(f"{score['same_top1']:.1%}")
        lines.append(cells)
    return markdown_table(("recipe", "tuned", "bits/weight", "s", *heads), lines, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration-text", type=Path, help="not needed where the model writes all windows")
    parser.add_argument("--windows", type=int, default=256, help="that are tuned on")
    parser.add_argument("--written", type=int, default=0, help="of them, those that the model writes itself")
    parser.add_argument("--statistics-windows", type=int, default=16, help="that statistics of inputs are taken of")
    parser.add_argument("--calibration-seq-len", type=int, default=SEQ_LEN)
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-windows", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no recipe later than this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    tunings = {name: _tuning(name) for name in options.recipes}
    started = time.perf_counter()
    original, tokenizer = load_model(options.model, dtype=torch.float32, device=options.device)
    artifact = calibrated(options, original, tokenizer)
    context = (tokenizer, [load_text(None, text, split="test") for text in options.texts], options)
    rows: list[dict[str, Any]] = []
    before: Untuned | None = None
    for name, settings in tunings.items():
        if time.perf_counter() - started > options.seconds:
            break
        if before is None or before.name != _without_tuning(name):
            before = untuned(_without_tuning(name), original, artifact, context)
            rows.append(before.row)
            write_document(options.json, {"model": Path(options.model).name, "rows": rows})
        if settings is not None:
            rows.append(tuned_row(name, settings, before, original=original, artifact=artifact, context=context))
            write_document(options.json, {"model": Path(options.model).name, "rows": rows})
    print(markdown(rows))


if __name__ == "__main__":
    run_script(main)
