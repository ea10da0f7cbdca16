"""``quantkit quantize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.common import (
    ActivationsOption,
    DeviceOption,
    JsonOption,
    RestartOption,
    SetOption,
    check_json_path,
    chosen_device,
    print_facts,
    print_table,
    write_json,
)
from quantkit.storage.place import check_folder, checked_place

if TYPE_CHECKING:
    from quantkit.jobs.estimate import Estimate
    from quantkit.models.unquantized import Unquantized


def quantize(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or smollm2-135m (the demo model).")],
    recipe: Annotated[str, typer.Option(help="Shipped recipe by name, or a .yaml file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the checkpoint to.")],
    calibration: Annotated[Path | None, typer.Option(help="Artifact of 'quantkit calibrate'.")] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    activations: ActivationsOption = "fp32",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier checkpoint at --out.")] = False,
    restart: RestartOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written and taken, and stop.")] = False,
    json_path: JsonOption = None,
) -> None:
    """Quantize a model by a recipe and write a checkpoint that transformers loads.

    One decoder block is in memory at a time. A run that was cut short goes on where it was.
    """
    check_json_path(json_path)
    from quantkit.recipe import load_recipe

    loaded_recipe = load_recipe(recipe, settings or ())
    from quantkit.jobs.expected_time import expected_seconds
    from quantkit.jobs.quantize import QuantizeOptions, expect, open_job, quantize_model
    from quantkit.ranks import joined

    with joined(chosen_device(device)) as (ranks, own):
        options = QuantizeOptions(own, activations, overwrite=overwrite, restart=restart, ranks=ranks)
        if dry_run:
            if ranks.leads:
                check_folder(out, checked_place(out, "output"), Path(model))
                job = open_job(model, loaded_recipe, calibration, options)
                seconds = expected_seconds(job.stream, job.plans, job.artifact, job.tuning)
                _show_estimate(expect(job, options), seconds, job.unquantized, json_path)
            return
        result = quantize_model(model, loaded_recipe, out, calibration=calibration, options=options)
    if result is None:
        return
    layers, tuning = result.report["layers"], result.report.get("tuning")
    tokens = [measured["tokens"] for measured in layers.values() if "tokens" in measured]
    print_facts(
        {
            "checkpoint": str(result.folder),
            "recipe": loaded_recipe.name,
            "layers quantized": str(result.layers),
            **_floating_point(result.unquantized),
            **({"tokens per expert": f"{min(tokens)} to {max(tokens)}"} if tokens else {}),
            "bits per weight": f"{result.bits_per_weight:.3f} (codes, scales and offsets of the quantized layers)",
            "size": f"{result.bytes / 1e6:.1f} MB (all weights)",
            **({} if tuning is None else {"tuning": _tuning(tuning)}),
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
            "per_layer": dict(layers),
            **({} if tuning is None else {"tuning": dict(tuning)}),
        },
    )


def _floating_point(left: Sequence[Unquantized]) -> dict[str, str]:
    rows = [f"{row.name} {row.share:.1%} ({row.reason})" for row in left]
    return {"floating point": ", ".join(rows)} if rows else {}


def _tuning(report: Mapping[str, Any]) -> str:
    """What the whole model's passes gained."""
    kept = f"pass {report['kept']} of {len(report['passes'])} kept" if report["kept"] else "no pass kept"
    losses = f"{report['before']:.4g} -> {report['after']:.4g} ({report['seen']:.4g} on windows tuned on)"
    return f"held-out loss {losses}, {kept}"


def _show_estimate(estimate: Estimate, seconds: float, left: Sequence[Unquantized], json_path: Path | None) -> None:
    from quantkit.jobs.expected_time import ERROR_FACTOR

    rows = [
        [layer.name, layer.method, f"{layer.shape[0]} x {layer.shape[1]}", _range(layer.bytes, layer.most_bytes)]
        for layer in estimate.layers
    ]
    print_table("Layers to be quantized", ["layer", "method", "N x K", "bytes"], rows)
    print_facts(
        {
            **_floating_point(left),
            "weight files": f"{_range(estimate.files, estimate.most_files)} bytes",
            "disk": f"{estimate.disk / 1e9:.3f} GB at the output's place, while the work lasts",
            "memory": f"about {estimate.memory / 1e9:.1f} GB at the peak, on {estimate.device}",
            "time": f"about {seconds:.0f} s without reading and writing files, by small samples on this machine as it "
            f"is now; may be off by a factor of {ERROR_FACTOR}",
        }
    )
    write_json(json_path, {**estimate.to_json(), "seconds": seconds, "unquantized": [asdict(row) for row in left]})


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"
