"""What the scripts share: how they end, the GPU they need, their JSON documents and their Markdown tables.

A script runs as ``python scripts/FOLDER/NAME.py`` from an environment made by ``make setup``. The checkout's root is on
its import path there, so that scripts import each other as ``scripts.FOLDER.NAME``.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import quantkit
from quantkit.bench.report import commit
from quantkit.cli.common import EXIT_USER_ERROR, one_line
from quantkit.errors import BenchError, QuantkitError
from quantkit.recipe import nearest


def run_script(main: Callable[[], None]) -> None:
    """Call main; what it cannot do, or a file it cannot read or write, is one line on stderr and exit status 2."""
    try:
        main()
    except (QuantkitError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def needed_gpu() -> torch.device:
    """The GPU to measure. Raises BenchError where torch finds none."""
    if not torch.cuda.is_available():
        raise BenchError("this measures an NVIDIA GPU, and torch finds none here")
    return torch.device("cuda")


def chosen(option: str, text: str, known: Collection[str]) -> list[str]:
    """Names separated by commas. Raises BenchError for one that is not known."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise BenchError(f"{option} {name}: unknown; {nearest(name, known)}")
    return names


def run_quantkit(*arguments: str) -> float:
    """Run one quantkit command in a process of its own, its output on stderr; the seconds it took.

    A command that fails has said why: the script then ends with its exit status.
    """
    print("\n$ quantkit", *arguments, file=sys.stderr, flush=True)
    started = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", "quantkit", *arguments], check=False, stdout=sys.stderr).returncode
    if code:
        sys.exit(code)
    return time.perf_counter() - started


def command_line() -> str:
    """The command that runs, for the document of its results."""
    return " ".join(["python", *sys.argv])


def environment_of(device: str, *packages: str) -> dict[str, Any]:
    """The device, the machine, the commit and the versions that the figures of a model's quality depend on."""
    versions = {name: version(name) for name in ("torch", "transformers", *packages)}
    machine = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    place = {"device": device, "machine": machine, "cores": os.cpu_count(), "python": platform.python_version()}
    return {**place, "commit": commit(), "packages": {"quantkit": quantkit.__version__, **versions}}


def read_document(path: Path, empty: dict[str, Any]) -> dict[str, Any]:
    """The JSON document of an interrupted run, to go on with; ``empty`` where there is none."""
    if not path.exists():
        return empty
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def write_document(path: Path | None, document: Any) -> None:
    """Write the results as JSON, where a path was given."""
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def replace_section(path: Path | None, mark: str, text: str) -> None:
    """Replace what stands between ``<!-- mark: begin -->`` and ``<!-- mark: end -->`` in a Markdown file, if given.

    Raises BenchError for a file without these marks.
    """
    if path is None:
        return
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    head, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise BenchError(f"{path}: the marks {begin} and {end} are missing")
    path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int | None = None) -> str:
    """A Markdown table; the first ``left`` columns are words and the others numbers, or all are words."""
    words = len(columns) if left is None else left
    rule = ["---"] * words + ["---:"] * (len(columns) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, rule, *rows))


def titled_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table under a heading."""
    return f"### {title}\n\n{markdown_table(columns, rows)}"
