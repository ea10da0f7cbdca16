"""``quantkit report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.common import print_line


def report(
    source: Annotated[Path, typer.Argument(help="A plan.yaml, a checkpoint, or a folder of JSON results.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write, figures inside.")],
    plot: Annotated[Path | None, typer.Option(help="Also write the figures as one PNG.")] = None,
) -> None:
    """Show plans, checkpoints and measurements as one HTML file."""
    from quantkit.report.page import write_report

    for path in write_report(source, out, plot):
        print_line(f"wrote {path} ({path.stat().st_size / 1e3:.0f} kB)")
