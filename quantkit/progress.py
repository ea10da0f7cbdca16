"""Progress on stderr: a bar with the time left on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from quantkit.ranks import is_first_rank

LINE_SECONDS = 30.0

Item = TypeVar("Item")


def track(
    items: Iterable[Item], description: str, total: int | None = None, *, every: float | None = None
) -> Iterator[Item]:
    """Yield the items while stderr shows how many are done and the time left.

    Where stderr is no terminal that is a line every so many seconds, also while one item takes longer; by default
    LINE_SECONDS.
    """
    if not is_first_rank():
        yield from items
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        count = len(items) if total is None and isinstance(items, Sized) else total
        yield from _tell(items, description, count, every or LINE_SECONDS)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, description=description, total=total)


def say(line: str) -> None:
    """One line on stderr, from the first rank; a stderr that takes nothing changes nothing."""
    if not is_first_rank():
        return
    with suppress(OSError, ValueError, AttributeError):
        print(f"quantkit: {line}", file=sys.stderr, flush=True)


def _tell(items: Iterable[Item], description: str, total: int | None, seconds: float) -> Iterator[Item]:
    done = 0
    began = time.monotonic()

    def line() -> str:
        gone = time.monotonic() - began
        left = f", about {_clock(gone / done * (total - done))} left" if done and total is not None else ""
        return f"{description}: {done}{'' if total is None else f' of {total}'} done in {_clock(gone)}{left}"

    with _repeated(lambda: say(line()), seconds):
        for item in items:
            yield item
            done += 1


@contextmanager
def _repeated(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call it every so many seconds, in a thread, while entered."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
