"""What every command shares: how results, JSON files and errors leave the program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantkit.errors import QuantkitError

EXIT_USER_ERROR = 2
PIPED_WIDTH = 500  # the widest table, inspect of flatten layers, takes 300

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the numbers as JSON.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe setting; repeatable.")
]


def one_line(error: Exception) -> str:
    """What the error says, without line ends."""
    return " ".join(str(error).split())


def fail(error: QuantkitError) -> typer.Exit:
    """Print the error as one line on stderr; raise what this returns."""
    typer.echo(f"quantkit: error: {one_line(error)}", err=True)
    return typer.Exit(EXIT_USER_ERROR)


def check_json_path(path: Path | None, option: str = "--json") -> None:
    """Raise QuantkitError now if the file could not be written when the work is done."""
    if path is not None and not path.absolute().parent.is_dir():
        raise QuantkitError(f"{option} {path}: the folder {path.absolute().parent} does not exist")


def write_json(path: Path | None, numbers: Any) -> None:
    """Write the numbers, indented and with a final newline, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; columns of numbers are right-aligned. Piped output is not folded to a terminal's width."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numeric = any(row[index] for row in rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text: 'quantkit[eval]' is no markup
    console.print(table)


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "+-.0123456789"


def print_facts(facts: Mapping[str, str]) -> None:
    """``name  value`` lines on stdout, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")
