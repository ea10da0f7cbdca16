"""Trials of damaged files: what reading one may come to, how many there are, and which.

MUTATIONS in the environment multiplies their numbers; FUZZ_SEED chooses others.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError

MULTIPLIER = float(os.environ.get("MUTATIONS", "1"))
SEED = os.environ.get("FUZZ_SEED", "0")
MOST_SECONDS = 60  # a mutation that takes longer hangs: the slowest takes one, on a busy machine ten
REFUSED, EQUAL = "refused", "equal"


@dataclass(frozen=True)
class Trial:
    """chance: what makes this mutation's choices. number: which one it is."""

    chance: random.Random
    number: int


def trials(what: str, count: int) -> Iterator[Trial]:
    """So many mutations of a kind, each with choices of its own: one alone can be run again."""
    for number in range(max(1, round(count * MULTIPLIER))):
        yield Trial(random.Random(f"{SEED} {what} {number}"), number)


class _Hang(BaseException):
    """The program waits for something that never comes."""


@contextmanager
def limited() -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def ring(_number: int, _frame: Any) -> None:
        raise _Hang

    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def outcome(read: Callable[[], bool], trial: Trial) -> str:
    """What reading a damaged file came to; asserts that it is one of the two that are allowed."""
    message = None
    try:
        with limited():
            same = read()
    except QuantkitError as error:
        message, same = str(error), True
    except (_Hang, Exception) as error:
        error.add_note(f"trial {trial.number} of seed {SEED}")
        raise
    assert same, f"trial {trial.number}: other values were read in silence"
    assert "\n" not in (message or ""), f"trial {trial.number}: {message}"
    return EQUAL if message is None else REFUSED


def remove(path: Path) -> None:
    """Remove whatever a mutation has made of a file."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
