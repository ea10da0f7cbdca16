"""Small result files of every kind, as the commands write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OPTIONS = ((2, -1), (2, 64), (3, -1), (3, 64))


def search_document() -> dict[str, Any]:
    """Of two blocks with two Linears each; the names hold what HTML must escape."""
    layers = {}
    for index, name in enumerate(("l.0.attn.q", "l.0.mlp.<up>", "l.1.attn.q", "l.1.mlp.<up>")):
        rows = [
            {
                "weight_bits": bits,
                "group_size": group,
                "stored": 100 * bits + (group > 0) * 50,
                "output_error": 4.0**-bits,
                "estimated_kl": 4.0**-bits * (index + 1),
                "measured_kl": None,
                "predicted_kl": 4.0**-bits * (index + 1) * (0.8 if group > 0 else 1),
            }
            for bits, group in OPTIONS
        ]
        layers[name] = {"shape": [8, 128], "bits_per_weight": 2.5 + index / 4, **rows[index], "table": rows}
    points = [{"label": f"q{b} g{g}", "bits_per_weight": b + (g > 0) / 2, "predicted_kl": 4.0**-b} for b, g in OPTIONS]
    return {
        "kind": "search",
        "quantkit": "0.1.0",
        "model": "tiny <model>",
        "method": "bcq",
        "settings": {},
        "per": "layer",
        "budget": {"kind": "bpw", "limit": 2.75},
        "calibration": {"texts": [{"name": "sample.txt"}], "tokens": 128, "seq_len": 32},
        "bits_per_weight": 2.7,
        "bytes": 12345,
        "predicted_kl": 0.05,
        "gap": 0.0,
        "measured_kl": None,
        "options": [f"q{b} g{g}" for b, g in OPTIONS],
        "layers": layers,
        "uniform": points,
        "types": points,
        "frontier": points,
    }


def divergence_document(model: str = "tiny-q3") -> dict[str, Any]:
    """Of 100 tokens in four bins."""
    numbers = dict.fromkeys(("mean_kl", "median_kl", "p90_kl", "p99_kl", "same_top1"), 0.125)
    return {
        "reference": "tiny",
        "model": model,
        **numbers,
        **{f"{key}_stderr": 0.01 for key in numbers},
        "perplexity": 24.5,
        "reference_perplexity": 23.75,
        "windows": 2,
        "tokens": 102,
        "scored_tokens": 100,
        "text": "sample.txt",
        "text_sha256": "ab" * 32,
        "seq_len": 51,
        "seconds": 1.0,
        "histogram": {"edges": [1e-6, 1e-3, 1e-2, 0.1, 1.0], "counts": [10, 20, 40, 30]},
    }


def comparison_document() -> dict[str, Any]:
    """Of a reference and two quantized models with one task."""
    rows = [
        {
            "model": model,
            "label": label,
            "bytes": size,
            "bits_per_weight": bits,
            "divergence": divergence_document(model),
            "milliseconds_per_token": 3.25,
            "scores": [{"task": "piqa", "metric": "acc", "value": 0.625, "stderr": 0.02, "examples": 500}],
        }
        for model, label, size, bits in (
            ("tiny", "float16", 1000, 16.0),
            ("tiny-q3", "bcq q3 g64", 300, 3.5),
            ("tiny-q3-row", "bcq q3 row", 250, 3.1),
        )
    ]
    place = {"device": "cpu", "machine": "x86_64"}
    return {"kind": "comparison", "rows": rows, "quantkit": "0.1.0", "torch": "2.11.0", **place}


def perplexity_document() -> dict[str, Any]:
    """As ``eval perplexity --json`` writes it."""
    return {
        "model": "tiny-q3",
        "perplexity": 27.375,
        "stderr": 0.5,
        "windows": 2,
        "tokens": 102,
        "text": "sample.txt",
        "text_sha256": "cd" * 32,
        "recipe": "gptq",
        "seq_len": 51,
    }


def write(path: Path, document: Any) -> Path:
    """The document as a JSON file."""
    path.write_text(json.dumps(document))
    return path


def quality_document() -> dict[str, Any]:
    """A table as scripts/quality/ writes them: recipes, searched plans, and a peer whose row names its model."""
    place = {"device": "cpu"}

    def score(value: float) -> dict[str, Any]:
        return {"perplexity": value, "stderr": 0.5}

    sized = [("bcq-w4-g128", 4.625, 25.0), ("bcq-w3-g128", 3.5, 27.5), ("bcq-w3-g128+group_size=-1", 3.25, 29.0)]
    rows = [
        {"recipe": name, "bits_per_weight": bits, "bytes": 10**6, "evaluation": score(value), "environment": place}
        for name, bits, value in sized
    ]
    original = {"recipe": "original", "evaluation": score(24.0), "environment": place}
    peer = {"model": "tiny", "peer": "hqq:4:64", "bits_per_weight": 4.5, "evaluation": score(26.0)}
    plans = [
        {"recipe": f"search:{limit}", "bits_per_weight": limit, "evaluation": {"perplexity": value, "mean_kl": 0.1}}
        for limit, value in ((2.5, 33.25), (3.5, 26.5))
    ]
    return {"model": "tiny", "rows": [original, *rows, *plans, peer]}
