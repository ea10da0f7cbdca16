"""Quality of searched plans beside uniform recipes of their size, in memory: perplexity, KL and equal top tokens.

python scripts/quality/searched.py MODEL --text wiki.test.jsonl --calibration-text c4.txt --max-bpw 2.5 3.0 3.5 4.0
    --bits 2,3,4,5 --groups 64,128,256 --set scale_bits=8
    --uniform bcq-w2-g64-comp+scale_bits=8 bcq-w3-g64-s8-comp+group_size=128 --json docs/results/searched-MODEL.json

Plans, their error table and the calibration are kept beside the JSON file; rows already in it are kept. The rows have
the form of quality/table.py's, so that ``quantkit report docs/results`` draws them, uniform recipes and other toolkits
(quality/peers.py) into one plot per model. No checkpoint is written: the numbers are those of the stored values.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.artifact import Calibration, load_calibration, save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import load_text
from quantkit.jobs.search import Budget, search, search_settings
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.recipe import Recipe, load_recipe
from quantkit.search.table import Option
from scripts.common import command_line, environment_of, markdown_table, read_document, run_script, write_document
from scripts.quality.tuned import quantized, scores

SEQ_LEN = 512


def calibrated(options: argparse.Namespace, original: Any, tokenizer: Any) -> tuple[Calibration, Path]:
    """The calibration and its file, made where it is not there yet."""
    path = options.json.with_suffix(".safetensors")
    if not path.exists():
        stream, text = in_memory_stream(original), load_text(None, options.calibration_text, split="train")
        windows = {"windows": options.windows, "seq_len": SEQ_LEN, "seed": 0}
        found = calibrate(stream, tokenizer, text, name=options.name, **windows)
        assert found is not None  # of the first rank, and there is one
        save_calibration(found, path)
    return load_calibration(path), path


def searched(options: argparse.Namespace, limit: float, calibration: Path) -> tuple[Recipe, dict[str, Any]]:
    """The plan of a budget, found now or before, and what the search says of it."""
    plan = options.json.with_name(f"{options.json.stem}-{limit:g}.yaml")
    facts: dict[str, Any] = {}
    if not plan.exists():
        started = time.perf_counter()
        search(
            options.model,
            calibration,
            plan,
            budget=Budget("bpw", limit),
            options=[Option(bits, size) for bits in options.bits for size in options.groups],
            settings=search_settings([*options.set, f"device={options.device}"]),
        )
        facts["search_seconds"] = time.perf_counter() - started
    document = read_document(plan.with_suffix(".json"), {})
    layers = Counter(f"q{layer['weight_bits']} g{layer['group_size']}" for layer in document["layers"].values())
    facts |= {"predicted_kl": document["predicted_kl"], "layers": dict(sorted(layers.items()))}
    return load_recipe(str(plan)), facts


def measure(name: str, recipe: Recipe, artifact: Calibration, context: tuple[Any, ...]) -> dict[str, Any]:
    """One row."""
    original, tokenizer, text, options = context
    started = time.perf_counter()
    model, bits, _ = quantized(recipe, original, artifact)
    seconds = time.perf_counter() - started
    (evaluation,) = scores(original, model, tokenizer, [text], options)
    row = {"recipe": name, "bits_per_weight": bits, "seconds": seconds, "evaluation": evaluation}
    return {**row, "environment": environment_of(options.device), "command": command_line()}


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, the smallest first."""
    lines = []
    for row in sorted(rows, key=lambda row: float(row["bits_per_weight"])):
        score = row["evaluation"]
        kl = f"{score['mean_kl']:.4f} ± {score['mean_kl_stderr']:.4f}"
        bits, top = f"{row['bits_per_weight']:.3f}", f"{score['same_top1']:.1%}"
        lines.append([row["recipe"], bits, f"{score['perplexity']:.2f}", kl, f"{score['p99_kl']:.3f}", top])
    return markdown_table(
        ("recipe", "bits/weight", "perplexity", "mean KL", "99 % KL", "same top token"), lines, left=1
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration-text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=32, help="of the calibration text, 512 tokens each")
    parser.add_argument("--max-bpw", type=float, nargs="*", default=[], help="budgets to search for")
    parser.add_argument("--bits", type=_numbers, default=[2, 3, 4, 5])
    parser.add_argument("--groups", type=_numbers, default=[64, 128, 256])
    parser.add_argument("--set", nargs="*", default=["scale_bits=8"], help="settings of the search")
    parser.add_argument("--uniform", nargs="*", default=[], help="recipes, with settings: NAME+key=value")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-windows", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.name = Path(options.model).name
    document = read_document(options.json, {"rows": []})
    original, tokenizer = load_model(options.model, dtype=torch.float32, device=options.device)
    artifact, calibration = calibrated(options, original, tokenizer)
    context = (original, tokenizer, load_text(None, options.text, split="test"), options)
    document |= {"model": options.name, "calibration": artifact.meta.to_json()}
    done = {row["recipe"] for row in document["rows"]}
    for limit in options.max_bpw:
        name = f"search:{limit:g}"
        if name not in done:
            plan, facts = searched(options, limit, calibration)
            document["rows"].append({**measure(name, plan, artifact, context), **facts})
            write_document(options.json, document)
    for name in options.uniform:
        if name not in done:
            recipe, *settings = name.split("+")
            document["rows"].append(measure(name, load_recipe(recipe, settings), artifact, context))
            write_document(options.json, document)
    print(markdown(document["rows"]))


if __name__ == "__main__":
    run_script(main)
