"""FlattenQuant's Tables 3, 4, 7, 8, 9 and 10 on real models, by the functions behind the quantkit commands.

python scripts/flattenquant/tables.py smollm2-135m@2048 wiki-opt-34m@1024+20 --text wiki.test.jsonl
    --calibration-text c4.txt --json docs/results/flattenquant.json --markdown docs/flattenquant.md

A model is NAME@SEQ_LEN, or NAME@SEQ_LEN+FACTOR for a copy with injected outliers (inject_outliers.py beside this).
Rows already in the JSON file are kept, so an interrupted run goes on; --only takes a part of the tables. The
Markdown file keeps its own text: what stands between the two marker lines is replaced by the tables.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.artifact import save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.checkpoint.summary import summarize
from quantkit.data.corpora import load_text
from quantkit.evaluation.perplexity import perplexity
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.loading import load_model, open_stream
from quantkit.nn.clipping import count_clipping
from quantkit.recipe import load_recipe
from scripts.common import environment_of, read_document, replace_section, run_script, write_document
from scripts.flattenquant.inject_outliers import save_with_outliers
from scripts.flattenquant.runs import LEVELS, TABLES, Run
from scripts.flattenquant.tables_markdown import markdown

CALIBRATION_WINDOWS, CALIBRATION_SEQ_LEN = 32, 512
EVALUATED_TOKENS = 16384
INJECTED_CHANNELS = 4


def measure(model: str, run: Run, work: Path, options: argparse.Namespace, seq_len: int) -> dict[str, Any]:
    """Quantize one form, load the checkpoint and evaluate it; its row for the JSON file."""
    row: dict[str, Any] = {"run": run.key}
    evaluated = model
    if run.recipe:
        out = work / "quantized"
        recipe = load_recipe(run.recipe, run.settings)
        job = QuantizeOptions(device=options.device, overwrite=True)
        result = quantize_model(model, recipe, out, calibration=work / "c.safetensors", options=job)
        assert result is not None  # of one process
        row |= {"quantize_seconds": result.seconds, "bits_per_weight": result.bits_per_weight, **layer_facts(out)}
        evaluated = str(out)
    loaded, tokenizer = load_model(evaluated, device=options.device)
    windows = EVALUATED_TOKENS // seq_len
    corpus = load_text(None, options.text, split="test")
    row["evaluation"] = asdict(perplexity(loaded, tokenizer, corpus, seq_len=seq_len, max_windows=windows))
    if run.recipe in LEVELS and not run.overrides:
        with count_clipping(loaded) as counts:
            perplexity(loaded, tokenizer, corpus, seq_len=seq_len, max_windows=1)
        row["run_time_clip_rate"] = sum(c.clipped for c in counts.values()) / sum(c.seen for c in counts.values())
    return row


def layer_facts(folder: Path) -> dict[str, Any]:
    """INT4 share, mean flatten ratio, largest ones and the layers whose columns were limited."""
    layers = summarize(folder).layers
    ratios = {layer.name: layer.measured["flatten_ratio"] for layer in layers}
    limited = {layer.name: layer.measured["column_limit"] for layer in layers if "column_limit" in layer.measured}
    return {
        "int4_share": sum(layer.weight_bits == 4 for layer in layers) / len(layers),
        "flatten_ratio": sum(ratios.values()) / len(ratios),
        "largest_flatten_ratio": max(ratios.values()),
        "clip_rate": sum(layer.measured["clip_rate"] for layer in layers) / len(layers),
        "limited": limited,
    }


def measure_model(
    argument: str, tables: list[str], options: argparse.Namespace, document: dict[str, Any], keep: Path
) -> None:
    """Every run of the asked tables on one model, the JSON file written after each."""
    name, _, tail = argument.partition("@")
    seq_len, _, factor = tail.partition("+")
    entry = document["models"].setdefault(argument, {"rows": []})
    done = {row["run"] for row in entry["rows"]}
    source = options.path.get(name, name)
    runs = {run.key: run for table in tables for run in TABLES[table] if run.key not in done}
    if not runs:
        return
    here = environment_of(options.device)
    there = entry.setdefault("environment", here)
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), source
        if factor:
            model = str(work / "injected")
            entry["injected_channels"] = save_with_outliers(
                source, Path(model), factor=float(factor), channels=INJECTED_CHANNELS
            )
        stream, tokenizer = open_stream(model, dtype=torch.float32, device=options.device)
        artifact = calibrate(
            stream,
            tokenizer,
            load_text(None, options.calibration_text, split="train"),
            name=argument,
            windows=CALIBRATION_WINDOWS,
            seq_len=CALIBRATION_SEQ_LEN,
            seed=0,
        )
        assert artifact is not None  # of one process
        save_calibration(artifact, work / "c.safetensors")
        for run in runs.values():
            row = measure(model, run, work, options, int(seq_len))
            if here != there:
                row["environment"] = here
            entry["rows"].append(row)
            print(argument, run.key, f"{row['evaluation']['perplexity']:.3f}", file=sys.stderr, flush=True)
            write_document(keep, document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="NAME@SEQ_LEN or NAME@SEQ_LEN+FACTOR")
    parser.add_argument("--path", action="append", default=[], help="NAME=FOLDER: where a model of that name lies")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration-text", type=Path, required=True)
    parser.add_argument("--only", default=",".join(TABLES), help="tables to measure, comma-separated")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    options.path = dict(item.split("=", 1) for item in options.path)
    document = read_document(options.json, {"models": {}})
    torch.manual_seed(0)
    for model in options.models:
        measure_model(model, options.only.split(","), options, document, options.json)
    tables = markdown(document)
    replace_section(options.markdown, "tables", tables)
    print(tables)


if __name__ == "__main__":
    run_script(main)
