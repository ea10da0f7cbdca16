"""``quantkit convert``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common import JsonOption, check_json_path, print_facts, write_json


def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a GPTQ, AWQ or compressed-tensors model, or a GGUF file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the checkpoint to.")],
    exact: Annotated[
        bool, typer.Option("--exact", help="More planes where fp16 offsets would round; refuse what still does.")
    ] = False,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave activations in floating point where no kernel fits.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier checkpoint at --out.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Write a model that another tool quantized as a quantkit checkpoint."""
    check_json_path(json_path)
    from quantkit.jobs.convert import convert_model

    result = convert_model(source, out, exact=exact, weights_only=weights_only, overwrite=overwrite)
    rounded = result.layers - result.exact
    print_facts(
        {
            "checkpoint": str(result.folder),
            "source": result.method,
            "layers": f"{result.layers}, {result.exact} exact",
            "rounding": f"up to {result.rounding:.2g} of a group's largest weight, in {rounded} layers"
            if rounded
            else "none",
            **{"left out": ", ".join(f"{note} ({count} layers)" for note, count in result.notes.items()) or "nothing"},
            "bits per weight": f"{result.bits_per_weight:.3f} (codes, scales and offsets of the quantized layers)",
            "size": f"{result.bytes / 1e6:.1f} MB (all weights)",
            "converting took": f"{result.seconds:.1f} s",
        }
    )
    write_json(
        json_path,
        {
            "checkpoint": str(result.folder),
            "source": result.method,
            "layers": result.layers,
            "exact_layers": result.exact,
            "rounding": result.rounding,
            "notes": dict(result.notes),
            "bits_per_weight": result.bits_per_weight,
            "bytes": result.bytes,
            "seconds": result.seconds,
            "per_layer": {name: dict(report) for name, report in result.report.items()},
        },
    )
