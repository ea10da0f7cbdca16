"""``quantkit quantize``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common import JsonOption, SetOption, check_json_path, print_facts, write_json


def quantize(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or smollm2-135m (the demo model).")],
    recipe: Annotated[str, typer.Option(help="Shipped recipe by name, or a .yaml file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the checkpoint to.")],
    calibration: Annotated[Path | None, typer.Option(help="Artifact of 'quantkit calibrate'.")] = None,
    settings: SetOption = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, ...")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier checkpoint at --out.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Quantize a model by a recipe and write a checkpoint that transformers loads."""
    check_json_path(json_path)
    from quantkit.recipe import load_recipe

    loaded_recipe = load_recipe(recipe, settings or ())
    from quantkit.jobs.quantize import quantize_model

    result = quantize_model(model, loaded_recipe, out, calibration=calibration, device=device, overwrite=overwrite)
    tokens = [measured["tokens"] for measured in result.report.values() if "tokens" in measured]
    left = [f"{row.name} {row.share:.1%} ({row.reason})" for row in result.unquantized]
    print_facts(
        {
            "checkpoint": str(result.folder),
            "recipe": loaded_recipe.name,
            "layers quantized": str(result.layers),
            **({"floating point": ", ".join(left)} if left else {}),
            **({"tokens per expert": f"{min(tokens)} to {max(tokens)}"} if tokens else {}),
            "bits per weight": f"{result.bits_per_weight:.3f} (codes, scales and offsets of the quantized layers)",
            "size": f"{result.bytes / 1e6:.1f} MB (all weights)",
            "quantizing took": f"{result.seconds:.1f} s",
        }
    )
    write_json(
        json_path,
        {
            "checkpoint": str(result.folder),
            "recipe": loaded_recipe.name,
            "layers": result.layers,
            "bits_per_weight": result.bits_per_weight,
            "bytes": result.bytes,
            "seconds": result.seconds,
            "unquantized": [asdict(row) for row in result.unquantized],
            "per_layer": dict(result.report),
        },
    )
