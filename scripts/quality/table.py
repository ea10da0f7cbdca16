"""Perplexity, size and time of a model and of its quantized forms, each by the quantkit commands a user types.

python scripts/quality/table.py MODEL --text wiki.test.jsonl --calibration-text c4.txt --recipes bcq-w4-g128,...
    --seq-len 2048 --max-windows 8 --json docs/results/quality-MODEL.json

A recipe may carry settings: bcq-w4-g128+group_size=64; one with prefix=auto takes a calibration behind one. Without
--calibration-text the recipes, which then need none, are quantized without calibration. Rows already in the JSON file
are kept, so an interrupted run goes on where it stopped, or on another machine: each row says where it was measured.
Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from quantkit.checkpoint.summary import summarize
from scripts.common import environment_of, markdown_table, read_document, run_quantkit, run_script, write_document

CALIBRATION_SEQ_LEN = 512
ARTIFACT, PREFIX_ARTIFACT = "c.safetensors", "c-prefix.safetensors"
_PREFIX = "prefix=auto"
_COLUMNS = ("recipe", "bits/weight", "MB", "perplexity", "quantize s")


def command(*arguments: str, options: argparse.Namespace) -> list[str]:
    """The command as a reader would type it: file names without this machine's folders."""
    if options.device != "cpu" and arguments[0] != "calibrate":  # which takes the GPU by itself
        arguments = (*arguments, "--device", options.device)
    known = {text: Path(text).name for text in (options.text, options.calibration_text) if text}
    known[options.model] = options.name
    return ["quantkit", *(known.get(argument, argument) for argument in arguments)]


def measure(options: argparse.Namespace, recipe: str | None, work: Path) -> dict[str, Any]:
    """One row: quantize (unless recipe is None, the original) and evaluate."""
    evaluated = options.model
    row: dict[str, Any] = {"recipe": recipe or "original", "environment": environment_of(options.device)}
    if recipe:
        evaluated = str(work / recipe)
        out = ["--out", evaluated, "--json", f"{evaluated}.quantize.json"]
        name, *settings = recipe.split("+")
        chosen = ["--recipe", name, *(part for setting in settings for part in ("--set", setting))]
        artifact = artifact_of(recipe)
        places = (str(work / artifact), artifact)  # here, and as a reader would type it
        read, told = (["--calibration", place] if options.calibration_text else [] for place in places)
        arguments = ["quantize", options.model, *chosen, *read]
        row["quantize_wall_seconds"] = run_quantkit(*arguments, *out, "--device", options.device)
        numbers = json.loads(Path(f"{evaluated}.quantize.json").read_text())
        row |= {key: numbers[key] for key in ("bits_per_weight", "bytes", "seconds")}
        row |= columns_of(Path(evaluated))
        shown = ["quantize", options.model, *chosen, *told, "--out", recipe]
        row["quantize_command"] = command(*shown, options=options)
    score = work / f"{row['recipe']}.eval.json"
    row["evaluation"] = evaluation(["perplexity", evaluated], score, options)
    row["evaluate_command"] = evaluate_command(["perplexity", recipe or options.model], options)
    if recipe and options.divergence:
        row["divergence"] = evaluation(["divergence", options.model, evaluated], score, options)
        row["divergence_command"] = evaluate_command(["divergence", options.model, recipe], options)
    return row


def artifact_of(recipe: str) -> str:
    """The calibration that a recipe takes."""
    return PREFIX_ARTIFACT if _PREFIX in recipe.split("+") else ARTIFACT


def columns_of(folder: Path) -> dict[str, float]:
    """Extra columns per input channel, of all layers and of the worst, where the method adds any."""
    summary = summarize(folder)
    found = [
        (layer.measured["extended_channels"], layer.shape[1])
        for layer in summary.layers
        if "extended_channels" in layer.measured
    ]
    if not found:
        return {}
    extra, channels = (sum(numbers) for numbers in zip(*found, strict=True))
    return {
        "extended_columns": extra / channels,
        "most_extended_columns": max(extra / channels for extra, channels in found),
    }


def text_of(options: argparse.Namespace) -> list[str]:
    """What is read of the text."""
    return ["--text", options.text, "--seq-len", str(options.seq_len), "--max-windows", str(options.max_windows)]


def evaluation(what: list[str], score: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of ``quantkit eval WHAT``, which are left in ``score``."""
    run_quantkit("eval", *what, *text_of(options), "--device", options.device, "--json", str(score))
    numbers: dict[str, Any] = json.loads(score.read_text())
    return {key: value for key, value in numbers.items() if key not in ("model", "reference", "histogram")}  # folders


def evaluate_command(what: list[str], options: argparse.Namespace) -> list[str]:
    """The same as a reader would type it."""
    return command("eval", *what, *text_of(options), options=options)


def markdown(document: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = []
    for row in document["rows"]:
        score = row["evaluation"]
        size = (f"{row['bits_per_weight']:.2f}", f"{row['bytes'] / 1e6:.0f}") if "bytes" in row else ("", "")
        seconds = f"{row['seconds']:.0f}" if "seconds" in row else ""
        values = [f"{score['perplexity']:.2f} ± {score['stderr']:.2f}"]
        if any("divergence" in each for each in document["rows"]):
            values += _divergence(row.get("divergence"))
        lines.append([row["recipe"], *size, *values, seconds])
    more = ("mean KL", "99 % KL", "same top token") if lines and len(lines[0]) > len(_COLUMNS) else ()
    return markdown_table((*_COLUMNS[:-1], *more, _COLUMNS[-1]), lines, left=1)


def _divergence(score: dict[str, Any] | None) -> list[str]:
    """The cells of a row; empty for the original."""
    if score is None:
        return ["", "", ""]
    mean = f"{score['mean_kl']:.4f} ± {score['mean_kl_stderr']:.4f}"
    return [mean, f"{score['p99_kl']:.3f}", f"{score['same_top1']:.1%}"]


def calibrate(options: argparse.Namespace, work: Path, artifact: str) -> list[str]:
    """The command that makes a calibration; run where the artifact is not there yet."""
    windows = ["--windows", str(options.windows), "--seq-len", str(CALIBRATION_SEQ_LEN)]
    prefix = ["--prefix"] if artifact == PREFIX_ARTIFACT else []
    arguments = ["calibrate", options.model, "--text", options.calibration_text, *windows, *prefix]
    if not (work / artifact).exists():
        run_quantkit(*arguments, "--out", str(work / artifact))
    return command(*arguments, "--out", artifact, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", help="its name in the results; by default as given, of a folder its own")
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration-text")
    parser.add_argument("--windows", type=int, default=32, help="of the calibration text, 512 tokens each")
    parser.add_argument("--work", type=Path, help="folder to keep the calibration and the checkpoints in")
    parser.add_argument("--recipes", required=True, help="comma-separated")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--max-windows", type=int, default=8)
    parser.add_argument("--divergence", action="store_true", help="also KL to the original, on the same text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.name = options.name or (Path(options.model).name if Path(options.model).is_dir() else options.model)
    document = read_document(options.json, {"rows": []})
    document["model"] = options.name
    done = {row["recipe"] for row in document["rows"]}
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        recipes = [recipe for recipe in options.recipes.split(",") if recipe not in done]
        if options.calibration_text:
            for artifact in dict.fromkeys(map(artifact_of, recipes)):
                key = "calibrate_command" if artifact == ARTIFACT else "calibrate_prefix_command"
                document[key] = calibrate(options, work, artifact)
        for recipe in [None, *recipes]:
            if (recipe or "original") not in done:
                document["rows"].append(measure(options, recipe, work))
                write_document(options.json, document)
    print(markdown(document))


if __name__ == "__main__":
    run_script(main)
