"""Quality by the Hessian that codes are chosen against, in one process and in memory: perplexity, KL, equal top tokens.

python scripts/quality/hessians.py MODEL --texts wiki.test.jsonl --calibration-text c4.txt --groups 0 1 4
    --recipes bcq-w4-g128-comp bcq-w3-g128-comp bcq-w3-g128-comp+weight_bits=2 --json docs/results/hessians-MODEL.json

A recipe may carry settings. groups: of output channels with a Hessian of their own weighed by the end loss; 0 is
E[x x^T] of all tokens alike. Rows already in the JSON file are kept. No checkpoint is written: the numbers are those of
the stored values.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.artifact import Calibration, load_calibration, save_calibration
from quantkit.calibration.runner import calibrate
from quantkit.data.corpora import load_text
from quantkit.errors import CalibrationError
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.recipe import load_recipe
from scripts.common import command_line, environment_of, markdown_table, read_document, run_script, write_document
from scripts.quality.tuned import quantized, scores

SEQ_LEN = 512


def calibrated(options: argparse.Namespace, original: Any, tokenizer: Any) -> Calibration:
    """The calibration with the gradients of the largest number of groups, kept beside the results."""
    path = options.json.with_suffix(".safetensors")
    if path.exists():
        return load_calibration(path)
    corpus = load_text(None, options.calibration_text, split="train")
    found = calibrate(
        in_memory_stream(original),
        tokenizer,
        corpus,
        name=options.name,
        windows=options.windows,
        seq_len=SEQ_LEN,
        seed=0,
        saliency=max(options.groups),
    )
    assert found is not None  # of the first rank, and there is one
    save_calibration(found, path)
    return found


def in_groups(artifact: Calibration, groups: int) -> Calibration:
    """The calibration with gradients of fewer groups: their means, which need groups of one size.

    Raises CalibrationError where they do not go together.
    """
    if not groups or groups == artifact.meta.saliency:
        return artifact
    if artifact.meta.saliency % groups:
        raise CalibrationError(f"--groups {groups}: does not divide {artifact.meta.saliency}, which were calibrated")
    means = {name: w.float().unflatten(1, (groups, -1)).mean(dim=2) for name, w in artifact.saliency.items()}
    return replace(artifact, saliency=means, meta=replace(artifact.meta, saliency=groups))


def measure(recipe: str, groups: int, artifact: Calibration, context: tuple[Any, ...]) -> dict[str, Any]:
    """One row."""
    original, tokenizer, texts, options = context
    name, *settings = recipe.split("+")
    chosen = load_recipe(name, [*settings, *(["hessian=end_loss"] if groups else [])])
    started = time.perf_counter()
    model, bits, _ = quantized(chosen, original, artifact)
    return {
        "recipe": recipe,
        "groups": groups,
        "bits_per_weight": bits,
        "seconds": time.perf_counter() - started,
        "evaluations": scores(original, model, tokenizer, texts, options),
        "environment": environment_of(options.device),
        "command": command_line(),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, three columns per text."""
    texts = [score["text"] for score in rows[0]["evaluations"]]
    heads = [f"{text}: {kind}" for text in texts for kind in ("perplexity", "mean KL", "same top token")]
    lines = []
    for row in rows:
        what = f"end_loss, {row['groups']} groups" if row["groups"] else "activations"
        cells = [row["recipe"], what, f"{row['bits_per_weight']:.2f}", f"{row['seconds']:.0f}"]
        for score in row["evaluations"]:
            cells += [f"{score['perplexity']:.2f}", f"{score['mean_kl']:.4f}", f"{score['same_top1']:.1%}"]
        lines.append(cells)
    return markdown_table(("recipe", "hessian", "bits/weight", "s", *heads), lines, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", help="how the model is called in the results; by default its folder's name")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--calibration-text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=32, help="of the calibration text, 512 tokens each")
    parser.add_argument("--groups", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--max-windows", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    options.name = options.name or Path(options.model).name
    document = read_document(options.json, {"rows": []})
    document["model"] = options.name
    original, tokenizer = load_model(options.model, dtype=torch.float32, device=options.device)
    texts = [load_text(None, text, split="test") for text in options.texts]
    texts = [replace(text, name=Path(text.name).name) for text in texts]
    done = {(row["recipe"], row["groups"]) for row in document["rows"]}
    artifact = calibrated(options, original, tokenizer)
    document["calibration"] = artifact.meta.to_json()
    for recipe, groups in itertools.product(options.recipes, options.groups):
        if (recipe, groups) not in done:
            context = (original, tokenizer, texts, options)
            document["rows"].append(measure(recipe, groups, in_groups(artifact, groups), context))
            write_document(options.json, document)
    print(markdown(document["rows"]))


if __name__ == "__main__":
    run_script(main)
