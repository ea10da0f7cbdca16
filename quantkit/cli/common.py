"""What every command shares: how results, JSON files and errors leave the program."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantkit.errors import OutputError, refusing
from quantkit.storage.output import write_file
from quantkit.storage.place import check_file

EXIT_USER_ERROR = 2
PIPED_WIDTH = 500  # the widest table, inspect of flatten layers, takes 300

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the numbers as JSON.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe setting; repeatable.")
]


def one_line(error: Exception) -> str:
    """What the error says, without line ends."""
    return printable(" ".join(str(error).split()))


def printable(text: str) -> str:
    """The text with what a terminal would obey, or cannot show, written out: names come from files of others."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def fail(error: Exception) -> typer.Exit:
    """Print the error as one line on stderr; raise what this returns."""
    with contextlib.suppress(OSError):  # a stderr that is full or closed takes nothing; the exit status says it
        typer.echo(f"quantkit: error: {one_line(error)}", err=True)
    return typer.Exit(EXIT_USER_ERROR)


def check_json_path(path: Path | None, option: str = "--json") -> None:
    """Raise OutputError now if the file could not be written when the work is done."""
    if path is not None:
        check_file(path, option, replace=True)


def write_json(path: Path | None, numbers: Any) -> None:
    """Write the numbers, indented and with a final newline, where a path was given.

    Raises OutputError for a path that cannot be written.
    """
    if path is not None:
        write_file(path, (json.dumps(numbers, indent=2) + "\n").encode(), "--json")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; columns of numbers are right-aligned. Piped output is not folded to a terminal's width."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, PIPED_WIDTH)
    table = Table(title=Text(printable(title)), title_justify="left")
    for index, column in enumerate(columns):
        numeric = any(row[index] for row in rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # Text: 'quantkit[eval]' is no markup
    with console.capture() as drawn:
        console.print(table)
    with _printing():  # not by rich, which ends the program at a broken pipe without a word
        typer.echo(drawn.get(), nl=False)


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "+-.0123456789"


def print_facts(facts: Mapping[str, str]) -> None:
    """``name  value`` lines on stdout, aligned."""
    width = max(map(len, facts))
    for name, value in facts.items():
        print_line(f"{name:<{width}}  {value}")


def print_line(line: str) -> None:
    """One line on stdout. Raises OutputError for a stdout that is full or closed."""
    with _printing():
        typer.echo(printable(line))


def _printing() -> refusing:
    return refusing("standard output cannot be written", OutputError)
