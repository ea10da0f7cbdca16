"""Writing results so that what stands at the place asked for is whole at every moment.

A result is made beside its place, under a hidden name that only this package uses, written through to the disk, and
renamed. A crash leaves the old result or the new one; what it leaves beside them, the next writer of the same place
removes.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

from quantkit.errors import OutputError, refusing
from quantkit.storage.place import (
    TOKEN_BYTES,
    beside,
    check_file,
    check_folder,
    checked_place,
    clear_leftovers,
    is_absent_or_empty,
    is_stream,
    locked,
    make_folder,
    status,
)
from quantkit.storage.rename import UNSUPPORTED, exchange, rename_new

_KEPT_NAME = 40  # letters of a place's name in that of a result that could not be put there

Foreign = Callable[[Path], str | None]
"""Why a folder holds what quantkit did not write (a sentence), or None where all of it is ours."""


class OutputFolder:
    """A folder in the making: write into ``work``, then ``publish`` it to ``place``."""

    def __init__(self, place: Path, work: Path, replaced: int | None, foreign: Foreign | None):
        """replaced: inode of the folder that stands at the place and gives way to this one, or None."""
        self.place, self.work = place, work
        self._replaced, self._foreign = replaced, foreign
        self.published = False

    def publish(self) -> None:
        """Write the folder through to the disk and move it to its place in one step; what it replaces is deleted last.

        Raises OutputError where that fails, or where something else has appeared at the place: that stays, and the
        finished folder is kept beside it under a name that the error tells.
        """
        with refusing(f"output {self.place} cannot be written", OutputError):
            _sync_tree(self.work)
            if self._replaced is None:
                if not is_absent_or_empty(self.place):
                    self._keep()
                self.work.rename(self.place)
                self.published = True
                sync(self.place.parent)
                return
            if not self._is_replaceable(self.place):
                self._keep()
            exchange(self.work, self.place, aside=beside(self.place, "old"))
            if not self._is_replaceable(self.work):  # changed in the last moment
                exchange(self.work, self.place, aside=beside(self.place, "old"))
                self._keep()
            self.published = True
            sync(self.place.parent)
            shutil.rmtree(self.work)
            sync(self.place.parent)

    def _is_replaceable(self, folder: Path) -> bool:
        """Whether the folder is the one that was there at the start, and nothing of others came into it."""
        found = status(folder)
        ours = self._foreign is not None and self._foreign(folder) is None
        return ours and found is not None and found.st_ino == self._replaced

    def _keep(self) -> NoReturn:
        kept = self.place.with_name(f"{self.place.name[:_KEPT_NAME]}-{secrets.token_hex(TOKEN_BYTES)}")
        self.work.rename(kept)
        raise OutputError(f"output {self.place}: something else was put there meanwhile; the finished one is in {kept}")


@contextmanager
def output_folder(
    out: Path, *, replace: bool, foreign: Foreign | None, source: Path | None = None
) -> Iterator[OutputFolder]:
    """A folder to write ``out`` into, checked and locked at once; without ``publish`` nothing of it is left.

    replace: whether a folder of ours that stands there gives way. foreign: None where none ever does. source: the model
    that is read, which is never replaced, nor a folder above it.
    Raises OutputError for a place that cannot be written, holds something else, or is being written by another process.
    """
    failure = f"output {out} cannot be written"
    place = checked_place(out, "output")
    with refusing(failure, OutputError):
        check_folder(out, place, source)
    with locked(f"output {out}", place):
        with refusing(failure, OutputError):
            clear_leftovers(place)
            replaced = _replaceable(out, place, replace, foreign)
            folder = OutputFolder(place, make_folder(place), replaced, foreign)
        try:
            yield folder
        finally:
            if not folder.published:
                shutil.rmtree(folder.work, ignore_errors=True)


@contextmanager
def output_file(out: Path, parameter: str = "`out`", *, replace: bool = False) -> Iterator[Path]:
    """A path to write a file to; when the block ends it stands at ``out``, whole, and after an error it never was.

    replace: whether a file that stands there gives way. Otherwise ``out`` is locked as well: a second writer is refused
    before its work. Raises OutputError as output_folder does.
    """
    what = f"{parameter} {out}"
    place = check_file(out, parameter, replace=replace)
    with nullcontext() if replace else locked(what, place):
        if not replace:
            with refusing(f"{what} cannot be written", OutputError):
                clear_leftovers(place)
        work = beside(place, "new")
        try:
            yield work
            with refusing(f"{what} cannot be written", OutputError):
                _move_file(work, place, replace)
        finally:
            with suppress(OSError):
                work.unlink()


def _move_file(work: Path, place: Path, replace: bool) -> None:
    sync(work)
    if replace:
        work.replace(place)
    else:
        try:
            rename_new(work, place)
        except FileExistsError:
            raise OutputError(f"output {place}: something else was put there meanwhile; it was left alone") from None
    sync(place.parent)


def write_file(out: Path, content: bytes, parameter: str = "`out`") -> None:
    """Write a file in one step, replacing one that stands there; a pipe or a terminal is written to as it is."""
    place = check_file(out, parameter, replace=True)
    with refusing(f"{parameter} {out} cannot be written", OutputError):
        if is_stream(place):
            place.write_bytes(content)
            return
        with output_file(out, parameter, replace=True) as work:
            work.write_bytes(content)


def _replaceable(out: Path, place: Path, replace: bool, foreign: Foreign | None) -> int | None:
    """The inode of the folder that gives way, None where there is none or an empty one."""
    found = status(place)
    if found is None or is_absent_or_empty(place):
        return None
    if foreign is None:
        raise OutputError(f"output {out}: the folder is not empty; choose another name or remove it")
    if not replace:
        raise OutputError(f"output {out}: the folder is not empty; pass `overwrite` to replace it")
    problem = foreign(place)
    if problem is not None:
        raise OutputError(f"output {out}: {problem}, so `overwrite` will not delete it")
    return found.st_ino


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(root) / name)
        sync(Path(root))


def sync(path: Path) -> None:
    """Write a file, or a folder's names, through to the disk; some network file systems cannot, for folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
