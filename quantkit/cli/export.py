"""``quantkit export``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common import JsonOption, check_json_path, print_facts, write_json


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A quantkit checkpoint.")],
    to: Annotated[str, typer.Option(help="compressed-tensors, gptq, gguf, humming or mlx.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder to write the model to.")],
    exact: Annotated[bool, typer.Option("--exact", help="Refuse what the other format rounds.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Write a checkpoint in the format of another engine."""
    check_json_path(json_path)
    from quantkit.jobs.export import export_model

    result = export_model(checkpoint, out, to=to, exact=exact)
    rounded = result.layers - result.exact
    print_facts(
        {
            "model": str(result.folder),
            "format": to,
            "layers": f"{result.layers}, {result.exact} exact",
            "rounding": f"up to {result.rounding:.2g} of a group's largest weight, in {rounded} layers"
            if rounded
            else "none",
            "size": f"{result.bytes / 1e6:.1f} MB (all weights)",
            "exporting took": f"{result.seconds:.1f} s",
        }
    )
    write_json(json_path, {**asdict(result), "folder": str(result.folder), "format": to})
