"""What the JSON documents of a report must look like, checked before anything is drawn."""

from __future__ import annotations

from typing import Any

from quantkit.storage.checks import (
    Check,
    Fields,
    anything,
    list_of,
    map_of,
    nullable,
    number,
    positive,
    record,
    text,
    whole,
    word,
)

_POINTS = list_of(record({"label": word, "bits_per_weight": number, "predicted_kl": number}))
_CHOICE: Fields = {"weight_bits": whole(1), "stored": number, "predicted_kl": number}
_LAYER = record(
    {
        "shape": list_of(whole(1), least=2, most=2),
        "weight_bits": whole(1),
        "group_size": whole(-1),
        "bits_per_weight": number,
        "output_error": number,
        "predicted_kl": number,
        "table": list_of(record(_CHOICE), least=1),
    }
)
_CALIBRATION = record({"texts": list_of(record({"name": text})), "tokens": whole(1), "seq_len": whole(1)})
_SEARCH = record(
    {
        "model": text,
        "method": text,
        "settings": anything,
        "per": text,
        "budget": record({"kind": text, "limit": number}),
        "calibration": _CALIBRATION,
        "bits_per_weight": number,
        "bytes": number,
        "predicted_kl": number,
        "gap": number,
        "measured_kl": nullable(number),
        "quantkit": text,
        "layers": map_of(_LAYER, least=1),
        "uniform": _POINTS,
        "types": _POINTS,
        "frontier": _POINTS,
    }
)
_KL = ("mean_kl", "median_kl", "p90_kl", "p99_kl")
_DIVERGENCE_FIELDS: Fields = {
    **{f"{key}{end}": number for key in _KL for end in ("", "_stderr")},
    "same_top1": number,
    "perplexity": number,
    "reference_perplexity": number,
    "tokens": whole(1),
    "seq_len": whole(1),
    "text": text,
    "text_sha256": text,
}
_HISTOGRAM = record({"edges": list_of(positive, least=2), "counts": list_of(whole(0), least=1)})
_DIVERGENCE = record({**_DIVERGENCE_FIELDS, "model": text, "histogram": _HISTOGRAM})
_PERPLEXITY = record(
    {
        "model": text,
        "perplexity": number,
        "stderr": number,
        "recipe": text,
        "seq_len": whole(1),
        "tokens": whole(1),
        "text": text,
        "text_sha256": text,
    }
)
_SCORE = record({"task": text, "metric": text, "value": number, "stderr": nullable(number)})
_ROW = record(
    {
        "model": text,
        "label": word,
        "bytes": nullable(positive),
        "bits_per_weight": number,
        "divergence": record(_DIVERGENCE_FIELDS),
        "milliseconds_per_token": nullable(number),
        "scores": list_of(_SCORE),
    }
)
_COMPARISON = record({"rows": list_of(_ROW, least=1), "device": text, "machine": text, "quantkit": text, "torch": text})
_RECIPE_ROW = record(
    {"evaluation": record({"perplexity": positive}, {"stderr": number})},
    {
        "recipe": nullable(text),
        "peer": text,
        "model": nullable(text),
        "bits_per_weight": nullable(positive),
        "bytes": number,
        "environment": record({}, {"device": text}),
    },
)


def _search(document: Any, where: str) -> None:
    _SEARCH(document, where)
    tables = {name: {row["weight_bits"] for row in layer["table"]} for name, layer in document["layers"].items()}
    for name, bits in tables.items():
        if bits != next(iter(tables.values())):
            raise ValueError(f"{where}.layers.{name}.table has other bit widths than the first layer's")


def _divergence(document: Any, where: str) -> None:
    _DIVERGENCE(document, where)
    histogram = document["histogram"]
    if len(histogram["edges"]) != len(histogram["counts"]) + 1 or not sum(histogram["counts"]):
        raise ValueError(f"{where}.histogram does not have one edge more than counts, or counts nothing")


def _comparison(document: Any, where: str) -> None:
    _COMPARISON(document, where)
    scored = [[(score["task"], score["metric"]) for score in row["scores"]] for row in document["rows"]]
    if any(own != scored[0] for own in scored):
        raise ValueError(f"{where}.rows have not all been scored on the same tasks")


def _table(document: Any, where: str) -> None:
    record({"rows": list_of(_RECIPE_ROW, least=1)}, {"model": text})(document, where)
    for index, row in enumerate(document["rows"]):
        if not row.get("recipe") and "peer" not in row:
            raise ValueError(f"{where}.rows[{index}] names neither a recipe nor a peer")
        if not row.get("model") and "model" not in document:
            raise ValueError(f"{where}.rows[{index}] names no model")


CHECKS: dict[str, Check] = {
    "searches": _search,
    "divergences": _divergence,
    "perplexities": _PERPLEXITY,
    "comparisons": _comparison,
    "tables": _table,
}
