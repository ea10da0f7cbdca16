"""The ``quantkit`` program: its commands, its version, and how its errors leave."""

from __future__ import annotations

from typing import Annotated

import typer

import quantkit
from quantkit.cli.bench import app as bench_app
from quantkit.cli.calibrate import calibrate
from quantkit.cli.common import Program
from quantkit.cli.compare import compare
from quantkit.cli.convert import convert
from quantkit.cli.doctor import doctor
from quantkit.cli.evaluate import app as evaluate_app
from quantkit.cli.export import export
from quantkit.cli.generate import generate
from quantkit.cli.inspect import inspect
from quantkit.cli.quantize import quantize
from quantkit.cli.recipes import recipes
from quantkit.cli.report import report
from quantkit.cli.search import search
from quantkit.cli.serve import CONTEXT, serve
from quantkit.errors import DeviceError
from quantkit.ranks import is_first_rank, rank_count

_TAKE_RANKS = ("calibrate", "quantize")

app = typer.Typer(
    cls=Program,
    help="Make large language models small and fast after training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quantkit {quantkit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    if rank_count() > 1 and context.invoked_subcommand not in _TAKE_RANKS:
        error = DeviceError(
            f"{context.invoked_subcommand} runs as one process; start it without torchrun or accelerate launch, which "
            f"are for {' and '.join(_TAKE_RANKS)}"
        )
        error.told = not is_first_rank()
        raise error


app.command()(calibrate)
app.command()(quantize)
app.command()(convert)
app.command()(export)
app.command()(search)
app.add_typer(evaluate_app, name="eval")
app.add_typer(bench_app, name="bench")
app.command()(generate)
app.command(context_settings=CONTEXT)(serve)
app.command()(compare)
app.command()(report)
app.command()(inspect)
app.command()(recipes)
app.command()(doctor)
