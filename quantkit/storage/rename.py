"""Renames that plain ``rename`` cannot do: two folders exchanged in one step, and never over something else."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_HERE = -100  # AT_FDCWD: relative paths count from the working folder
_NO_REPLACE, _EXCHANGE = 1, 2
# of a file system, or a system, that has no such rename
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(new: Path, place: Path, *, aside: Path) -> None:
    """Put ``new`` in the place of ``place`` and leave the old one at ``new``; a reader finds either, whole.

    Where the system cannot exchange two names, the old one is moved to ``aside`` between two renames.
    """
    if _rename(new, place, _EXCHANGE):
        return
    place.rename(aside)
    try:
        new.rename(place)
    except OSError:
        aside.rename(place)
        raise
    aside.rename(new)


def rename_new(made: Path, place: Path) -> None:
    """Rename a file; raises FileExistsError where something stands at the place."""
    if _rename(made, place, _NO_REPLACE):
        return
    os.link(made, place)
    made.unlink()


def _rename(source: Path, target: Path, flags: int) -> bool:
    """Whether the system did it; False where it knows no such rename. Raises OSError where it could not."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_HERE, os.fsencode(source), _HERE, os.fsencode(target), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(source), None, str(target))
