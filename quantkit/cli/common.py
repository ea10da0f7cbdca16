"""What every command shares: how results, JSON files and errors leave the program."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from quantkit.cli.ending import ends_at_once_as_a_rank, ends_in_order
from quantkit.errors import OutputError, QuantkitError, refusing
from quantkit.storage.output import write_file
from quantkit.storage.place import check_file

EXIT_USER_ERROR = 2
_SPEAKER_SECONDS = 60.0  # torchrun ends all ranks when one has failed: the one that speaks must be the first to end
PIPED_WIDTH = 500  # the widest table, inspect of flatten layers, takes 300
_PARAMETER = re.compile(r"`(\w+)`")

JsonOption = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Also write the numbers as JSON.")]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; by default the first GPU, else the CPU."),
]
ActivationsOption = Annotated[
    str, typer.Option("--activations", help="What hidden states are stored in between blocks: fp32 or bf16.")
]
RestartOption = Annotated[
    bool, typer.Option("--restart", help="Begin anew where an earlier run of the same output was cut short.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one recipe setting; repeatable.")
]


def chosen_device(device: str | None) -> str:
    """The device that was asked for, or the first GPU, or the CPU."""
    from quantkit.models.loading import first_device

    return device or first_device()


def one_line(error: Exception) -> str:
    """What the error says, without line ends."""
    return printable(" ".join(str(error).split()))


def printable(text: str) -> str:
    """The text with what a terminal would obey, or cannot show, written out: names come from files of others."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class Program(TyperGroup):
    """Commands whose expected errors are one line on stderr and exit code 2.

    Errors of the library name its parameters, as `seq_len`. A command's own parameters have the same names, so the line
    can name the options that set them, as --seq-len.
    """

    def main(self, *arguments: Any, **settings: Any) -> Any:
        with ends_at_once_as_a_rank():
            return super().main(*arguments, **settings)

    def invoke(self, ctx: Any) -> Any:
        try:
            with ends_in_order():
                return super().invoke(ctx)
        except QuantkitError as error:
            command = self.commands.get(ctx.invoked_subcommand)
            if error.told:
                time.sleep(_SPEAKER_SECONDS)
                raise typer.Exit(EXIT_USER_ERROR) from None
            with suppress(OSError):  # a stderr that is full or closed takes nothing; the exit status says it
                typer.echo(f"quantkit: error: {with_options(one_line(error), command)}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from None


def with_options(message: str, command: Any) -> str:
    """The message with every `parameter` as the option of the command that sets it, or bare where it has none."""
    options = {} if not isinstance(command, TyperCommand) else _options(command)
    return _PARAMETER.sub(lambda found: options.get(found[1], found[1]), message)


def _options(command: TyperCommand) -> dict[str, str]:
    """Parameter -> its first long option."""
    named = ((parameter.name, [name for name in parameter.opts if name[:2] == "--"]) for parameter in command.params)
    return {name: options[0] for name, options in named if name and options}


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


def print_text(text: str) -> None:
    """Text of a model on stdout as it is, at once, but for what a terminal would obey. Raises OutputError likewise."""
    with _printing():
        typer.echo("".join(char if char in "\n\t" else printable(char) for char in text), nl=False)
        sys.stdout.flush()


def _printing() -> refusing:
    return refusing("standard output cannot be written", OutputError)
