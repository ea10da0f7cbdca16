"""Faults at a chosen step of a job that writes: the process dies, or the disk is full, or broken.

A step is anything that changes a disk: making, opening or writing a file or folder, forcing it to disk, renaming,
removing. The shim stands in for Python's own functions; the product knows nothing of it.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from quantkit.errors import QuantkitError
from quantkit.storage import rename as rename_module

KILL, NO_SPACE, BROKEN_DISK = "kill -9", "no space", "I/O error"
ERRORS = {NO_SPACE: errno.ENOSPC, BROKEN_DISK: errno.EIO}
NEVER = -1
_STEPS = ("fsync", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "remove", "truncate")
_CREATES = os.O_CREAT | os.O_WRONLY | os.O_RDWR


@dataclass
class Shim:
    """Counts steps and, at number ``at``, brings about the fault. log: what each step was."""

    at: int
    fault: str
    log: list[str] = field(default_factory=list)
    taking: threading.Lock = field(default_factory=threading.Lock)

    def step(self, what: str, before: Callable[[], object] = lambda: None) -> None:
        """One step is about to be taken, in any thread; before: what the fault leaves done of it."""
        with self.taking:
            number = len(self.log)
            self.log.append(what)
        if number == self.at:
            before()
            if self.fault == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(ERRORS[self.fault], os.strerror(ERRORS[self.fault]))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While entered, stand in for the functions of this process."""
        real_open, real_os_open, real_pwrite = io.open, os.open, os.pwrite

        def opening(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return real_open(file, mode, *arguments, **options)
            self.step(f"open {file}")
            return _File(real_open(file, mode, *arguments, **options), self)

        def os_opening(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            if flags & _CREATES:
                self.step(f"os.open {path}")
            return real_os_open(path, flags, *arguments, **options)

        def pwriting(descriptor: int, content: Any, start: int) -> int:
            half = memoryview(content)[: len(content) // 2]
            self.step(f"pwrite {len(content)} at {start}", lambda: real_pwrite(descriptor, half, start))
            return real_pwrite(descriptor, content, start)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", pwriting)
            for name in _STEPS:
                patch.setattr(os, name, self._stepping(name, getattr(os, name)))
            patch.setattr(rename_module, "_rename", self._stepping("renameat2", rename_module._rename))
            patch.setattr(io, "open", opening)
            patch.setattr(builtins, "open", opening)
            patch.setattr(os, "open", os_opening)
            yield

    def _stepping(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.step(f"{name} {arguments[0]}")
            return real(*arguments, **options)

        return call


class _File:
    """A file whose writes are steps; a fault leaves half of what was to be written."""

    def __init__(self, inner: Any, shim: Shim):
        self._inner, self._shim = inner, shim

    def write(self, content: Any) -> Any:
        half = (
            memoryview(content)[: len(content) // 2] if not isinstance(content, str) else content[: len(content) // 2]
        )
        self._shim.step(f"write {self._inner.name}", lambda: (self._inner.write(half), self._inner.flush()))
        return self._inner.write(content)

    def __enter__(self) -> _File:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._inner.__exit__(*error)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def steps_of(job: Callable[[], None]) -> list[str]:
    """What a job does to the disk, step by step, when nothing fails."""
    shim = Shim(NEVER, KILL)
    with shim.installed():
        job()
    return shim.log


def killed(job: Callable[[], None], at: int) -> bool:
    """Run a job in a child that dies at a step; whether it died of that."""
    child = os.fork()
    if child == 0:
        try:
            with Shim(at, KILL).installed():
                job()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def refusal(job: Callable[[], None], at: int, fault: str) -> str:
    """Run a job with a fault at a step; the error it ends with, empty where it got over the fault."""
    with Shim(at, fault).installed():
        try:
            job()
        except QuantkitError as error:
            return str(error)
    return ""
