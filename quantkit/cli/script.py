"""What the scripts that measure share: the GPU they need, the parts they run, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

import torch

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
