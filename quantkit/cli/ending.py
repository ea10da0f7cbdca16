"""How the program ends when its results have nowhere to go, or when it is told to stop."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

from quantkit.errors import OutputError, reason
from quantkit.ranks import rank_count

_STOPS = (signal.SIGTERM, signal.SIGHUP)
_READER_GONE = 128 + signal.SIGPIPE


@contextmanager
def ends_in_order() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP end the program as Ctrl-C does: half-written results are removed on the way.

    A signal that is ignored (under nohup) stays ignored. Raises OutputError, before anything is done, where stdout is
    closed, and for results that cannot be printed. Raises SystemExit, with a shell's status for SIGPIPE, where the
    reader of a pipe has gone (``quantkit recipes | head -1``): it has what it wanted.
    """
    _fill_standard_streams()
    if sys.stdout is None:
        raise OutputError("standard output is closed; results would be lost")
    _let_children_end()
    former = {number: signal.getsignal(number) for number in _STOPS}
    for number, handler in former.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, OutputError) as error:
        if isinstance(error, OutputError) and not isinstance(error.__cause__, BrokenPipeError):
            raise
        raise SystemExit(_READER_GONE) from error
    except OSError as error:
        raise OutputError(f"{error.filename or 'standard output or a file'}: {reason(error)}") from error
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        _drop_what_cannot_be_printed()


@cache
def _let_children_end() -> None:
    """Forked children, such as those of lm-evaluation-harness, end at a signal as they would by themselves.

    Told to stop by an exception, a child that is in a hook of fork at that moment drops it and never ends.
    """
    os.register_at_fork(after_in_child=_take_defaults)


def _take_defaults() -> None:
    for number in _STOPS:
        if signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def ends_at_once_as_a_rank() -> Iterator[None]:
    """While entered, an exit of one of several ranks ends the process without winding down the interpreter.

    A worker thread of gloo drops the tensors of the last collective after the call has returned. It asks for the
    interpreter's lock to do so, and where the interpreter is ending by then, the answer is an abort: a rank that has
    done all its work dies by SIGABRT. Functions registered with atexit run, and what was printed is flushed.
    """
    try:
        yield
    except SystemExit as done:
        if rank_count() == 1:
            raise
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # full or closed: ends_in_order has said so
                stream.flush()
        os._exit(done.code if isinstance(done.code, int) else int(done.code is not None))


def _fill_standard_streams() -> None:
    """Give a closed standard stream's number to nothing, so that no file of ours gets it and then what others print."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def _drop_what_cannot_be_printed() -> None:
    """After a failure nothing may try again to write to a full or closed stdout: Python would, as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
