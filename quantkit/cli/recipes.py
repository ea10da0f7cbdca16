"""``quantkit recipes``."""

from __future__ import annotations

import typer

from quantkit.cli.common import JsonOption, check_json_path, print_table, write_json


def recipes(json_path: JsonOption = None) -> None:
    """List the shipped recipes: bits per weight, what each needs, and when to take it."""
    check_json_path(json_path)
    from quantkit.jobs.recipes import NOMINAL_SHAPE, shipped_recipes

    found = shipped_recipes()
    print_table(
        "shipped recipes; bits per weight of a {} x {} Linear, scales and offsets counted".format(*NOMINAL_SHAPE),
        ["recipe", "method", "bits/weight", "needs", "about"],
        [[r.name, r.method, _range(*r.bits_per_weight), r.needs, r.advice] for r in found],
    )
    typer.echo(
        "bcq and rtn weigh their errors by the calibration text where --calibration is given, also if not needed."
    )
    typer.echo("Every recipe quantizes and runs on a CPU. The GPU kernels need compute capability 8.0 or newer.")
    write_json(json_path, [recipe.to_json() for recipe in found])


def _range(least: float, most: float) -> str:
    return f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
