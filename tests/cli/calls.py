"""Calling the program in this process."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from quantkit.cli.app import app


def run(*arguments: str | Path) -> Result:
    """What ``quantkit ARGUMENTS`` leaves behind."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: str | Path) -> str:
    """The one line with which the program refuses; asserts exit code 2 and nothing on stdout."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("quantkit: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr
