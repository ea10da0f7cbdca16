"""``quantkit inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common import JsonOption, check_json_path, print_facts, print_table, write_json

if TYPE_CHECKING:
    from quantkit.checkpoint.summary import CheckpointSummary, LayerSummary

_ROW = -1  # columns per scale of a whole row


def inspect(
    folder: Annotated[Path, typer.Argument(help="A quantkit checkpoint, or a model that 'quantkit convert' reads.")],
    verify: Annotated[bool, typer.Option("--verify", help="Compare every tensor and file with its digest.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Show how every layer of a checkpoint is stored, and what was measured while quantizing it."""
    check_json_path(json_path)
    from quantkit.checkpoint.summary import summarize
    from quantkit.exchange.summary import is_foreign, summarize_source

    summary = summarize_source(folder, verify=verify) if is_foreign(folder) else summarize(folder, verify=verify)
    _print_layers(summary)
    print_facts(
        {
            "recipe": summary.recipe,
            "calibration": _calibration(summary.calibration),
            "bits per weight": f"{summary.bits_per_weight:.3f} over {len(summary.layers)} quantized layers",
            "quantized layers": f"{summary.quantized_bytes / 1e6:.1f} MB",
            "all weights": f"{summary.bytes / 1e6:.1f} MB",
            "attention": f"INT{summary.attention_bits}" if summary.attention_bits else "floating point",
            "digests": _digests(summary),
            "left in floating point": ", ".join(summary.ignore) or "no Linear",
        }
    )
    write_json(json_path, summary.to_json())


def _print_layers(summary: CheckpointSummary) -> None:
    measured = list(dict.fromkeys(key for layer in summary.layers for key in layer.measured))
    columns = ["layer", "method", "bits", "group", "N x K", "kB", "bits/weight", *measured]
    rows = [
        [
            layer.name,
            layer.method,
            _bits(layer),
            _group(layer.settings),
            "{} x {}".format(*layer.shape),
            f"{layer.bytes / 1e3:.1f}",
            f"{layer.bits_per_weight:.3f}",
            *(_number(layer.measured.get(key)) for key in measured),
        ]
        for layer in summary.layers
    ]
    print_table(f"{len(rows)} quantized layers", columns, rows)


def _digests(summary: CheckpointSummary) -> str:
    if not summary.digests:
        return "none: unverified"
    compared = "all compared: as written" if summary.verified else "compare them with --verify"
    return f"of {summary.digests} tensors ({compared})"


def _bits(layer: LayerSummary) -> str:
    return f"W{layer.weight_bits}A{layer.act_bits}"


def _group(settings: Mapping[str, Any]) -> str:
    """Columns per scale, the scales' bits where they are not 16, and whether inputs are rotated: ``64 s8 rotated``."""
    bits = settings.get("scale_bits", 16)
    by_row = "taps" in settings or settings.get("row_scales")
    size = settings.get("group_size", _ROW if by_row else None)
    size = {None: "tensor", _ROW: "row"}.get(size, str(size))
    return size + ("" if bits == 16 else f" s{bits}") + (" rotated" if settings.get("rotate_inputs") else "")


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _calibration(meta: Mapping[str, Any] | None) -> str:
    if meta is None:
        return "none"
    texts = ", ".join(str(text["name"]) for text in meta["texts"])
    return f"{texts}: {meta['tokens']} tokens in windows of {meta['seq_len']}"
