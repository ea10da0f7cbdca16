"""Errors of the library name its parameters; the program names the options that set them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import quantkit
from quantkit.cli.app import app
from quantkit.cli.common import Program, with_options
from quantkit.cuda.device import usable_device
from quantkit.data.corpora import check_text
from quantkit.errors import QuantkitError
from quantkit.recipe import load_recipe
from tests.cli.calls import refusal

PACKAGE = Path(quantkit.__file__).parent


def commands(group: Any = None) -> dict[str, Any]:
    """Every command of the program by its words."""
    found = {}
    for name, command in (group or get_command(app)).commands.items():
        if hasattr(command, "commands"):
            found |= {f"{name} {inner}": deeper for inner, deeper in commands(command).items()}
        else:
            found[name] = command
    return found


def test_a_parameter_becomes_the_option_that_sets_it() -> None:
    linear, calibrate = commands()["bench linear"], commands()["calibrate"]
    assert with_options("`tokens`: numbers must be positive", linear) == "--tokens: numbers must be positive"
    assert with_options("`seq_len` 9: use `out` 4", calibrate) == "--seq-len 9: use --out 4"


def test_what_a_command_has_no_option_for_stays_bare() -> None:
    assert (
        with_options("use `dataset` pydoc or `text` FILE", commands()["compare"]) == "use dataset pydoc or --text FILE"
    )
    assert with_options("`model` x: no such folder", commands()["generate"]) == "model x: no such folder"
    assert with_options("`model` x", None) == "model x"


@pytest.mark.parametrize(
    ("raised", "arguments", "library", "program"),
    [
        (
            lambda: usable_device("gpu"),
            ("bench", "decode", "opt-30b", "--method", "bcq-w4-g128", "--device", "gpu"),
            "`device` gpu: not a device; use cpu or cuda",
            "--device gpu: not a device; use cpu or cuda",
        ),
        (
            lambda: check_text(None, None),
            ("eval", "perplexity", "smollm2-135m"),
            "give either `dataset` (wikitext2, c4, pydoc) or `text` FILE",
            "give either --dataset (wikitext2, c4, pydoc) or --text FILE",
        ),
        (
            lambda: load_recipe("bcq-w4-g128", ["group_size"]),
            ("quantize", "m", "--recipe", "bcq-w4-g128", "--set", "group_size", "-o", "q"),
            "`settings` group_size: expected key=value, for example group_size=64",
            "--set group_size: expected key=value, for example group_size=64",
        ),
    ],
    ids=["device", "text", "settings"],
)
def test_both_levels_name_what_to_change(raised: Any, arguments: Any, library: str, program: str) -> None:
    with pytest.raises(QuantkitError) as caught:
        raised()
    assert str(caught.value) == library
    assert refusal(*arguments) == f"quantkit: error: {program}\n"


def test_parameters_that_the_library_names_are_parameters_of_a_command() -> None:
    named = set[str]()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise):
                texts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
                named |= {name for text in texts if isinstance(text, str) for name in re.findall(r"`(\w+)`", text)}
    known = {parameter.name for command in commands().values() for parameter in command.params}
    assert {"device", "seq_len", "settings"} <= named <= known


def test_an_error_in_a_command_of_a_group_is_one_line() -> None:
    inner = typer.Typer(cls=Program)

    @inner.command()
    def first(seq_len: int = 1) -> None:
        raise QuantkitError("`seq_len` 1: more")

    @inner.command()
    def second() -> None:
        raise AssertionError

    outer = typer.Typer(cls=Program)
    outer.add_typer(inner, name="group")
    outer.command()(second)
    result = CliRunner().invoke(outer, ["group", "first"])
    assert (result.exit_code, result.stderr) == (2, "quantkit: error: --seq-len 1: more\n")
