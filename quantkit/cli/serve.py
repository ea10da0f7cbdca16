"""``quantkit serve``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A quantized checkpoint.")],
) -> None:
    """Serve a checkpoint over HTTP by vLLM, with its OpenAI-compatible API.

    Checks the folder and that vLLM sees quantkit's plugin, prints the command and becomes it. All further options are
    vLLM's own: --port, --tensor-parallel-size, --max-model-len, ...
    """
    from quantkit.jobs.serve import serve_command

    command = serve_command(folder, context.args)
    typer.echo(f"$ {shlex.join(command.shown)}", err=True)
    os.execv(command.arguments[0], command.arguments)
