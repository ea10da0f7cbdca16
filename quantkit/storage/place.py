"""A place where a result is to stand: whether it may, who may write it, and the hidden names beside it.

Everything that can be known before the work is checked here: the place, the names, the permission (by making something
there), a second writer (by a lock that ends with its process), and what a killed writer left.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from quantkit.errors import OutputError, refusing

TOKEN_BYTES = 4
_MOUNTS = Path("/proc/self/mountinfo")
_MAX_NAME = 200  # bytes; longer names are hashed, for the hidden name is longer than its result's
_SPARE_PATH = 64  # bytes left for the names of files in a folder


def check_file(out: Path, parameter: str = "`out`", *, replace: bool = False) -> Path:
    """Where ``out`` is, links resolved, once it is known that a file can be written there.

    Raises OutputError for a folder, a place that cannot be written, or, without ``replace``, one that is taken.
    """
    what = f"{parameter} {out}"
    if replace and is_stream(out):
        return out
    place = checked_place(out, parameter)
    with refusing(f"{what} cannot be written", OutputError):
        if replace:
            place = place.resolve()
        found = status(place)
        if found is not None and not replace:
            raise OutputError(f"{what}: exists already; choose another name or remove it")
        if place.is_dir():
            raise OutputError(f"{what}: is a folder; name a file")
        if not place.parent.is_dir():
            raise OutputError(f"{what}: the folder {place.parent} does not exist")
        if found is not None and not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        probe = beside(place, "new")
        probe.touch(exist_ok=False)
        probe.unlink()
        return place


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a terminal or another device, such as /dev/stdout: written to, never replaced."""
    if path.parts[:2] == ("/", "dev"):  # /dev/stdout may lead to a file that the shell writes
        return path.exists() and not path.is_dir()
    with suppress(OSError):
        return path.exists() and not path.is_file() and not path.is_dir()
    return False


def checked_place(out: Path, parameter: str) -> Path:
    """The absolute path; the folders above it are free of links and dots, so that it is one name in one folder."""
    with refusing(f"{parameter} {out} cannot be written", OutputError):
        place = out.resolve() if out.name in ("", "..") else out.absolute()
        if not place.name:
            raise OutputError(f"{parameter} {out}: is the root folder; name something in it")
        return place.parent.resolve() / place.name


def check_folder(out: Path, place: Path, source: Path | None) -> None:
    found = status(place)
    if not place.parent.is_dir():
        raise OutputError(f"output {out}: the folder {place.parent} does not exist")
    if found is not None and stat.S_ISLNK(found.st_mode):
        raise OutputError(f"output {out}: is a symbolic link; name the folder itself")
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise OutputError(f"output {out}: is a file; choose a folder")
    if os.path.ismount(place) or str(place) in _mount_points():
        raise OutputError(f"output {out}: is a mount point and cannot be replaced; name a folder in it")
    if len(os.fsencode(place)) + _SPARE_PATH > os.pathconf(place.parent, "PC_PATH_MAX"):
        raise OutputError(f"output {out}: the path is too long")
    if place == Path.cwd() or place in Path.cwd().parents:
        raise OutputError(f"output {out}: is the folder that this program runs in, or holds it; choose another")
    if source is not None and source.exists():
        model = source.resolve()
        if place == model or place in model.parents:
            raise OutputError(f"output {out}: is the model's own folder, or holds it; choose another")


def _mount_points() -> set[str]:
    """Every mount point; also those of folders that a container binds from the same disk, which ismount misses."""
    if not _MOUNTS.exists():
        return set()
    fields = [line.split()[4] for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()]
    return {re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field) for field in fields}


def status(path: Path) -> os.stat_result | None:
    """What stands at a path, links not followed; None where nothing does. Raises OSError for an impossible path."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def is_absent_or_empty(place: Path) -> bool:
    found = status(place)
    return found is None or (stat.S_ISDIR(found.st_mode) and not any(place.iterdir()))


@contextmanager
def locked(what: str, place: Path) -> Iterator[None]:
    """Hold the lock of a place. It ends with the process, however that ends; the file is removed with it."""
    path = hidden(place, "lock")
    with refusing(f"{what} cannot be written", OutputError):
        descriptor = _lock(path, what)
    try:
        yield
    finally:
        with suppress(OSError):  # a lock file that stays harms nobody: the lock itself ends here
            path.unlink()
        os.close(descriptor)


def _lock(path: Path, what: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise OutputError(f"{what}: another process is writing it; wait for it or stop it") from None
            raise
        found = status(path)
        if found is not None and found.st_ino == os.fstat(descriptor).st_ino:
            return descriptor
        os.close(descriptor)  # the writer before us removed it between our two calls


def hidden(place: Path, use: str) -> Path:
    """The hidden name beside a place that only this package uses, for one use."""
    name = os.fsencode(place.name)
    stem = place.name if len(name) <= _MAX_NAME else sha256(name).hexdigest()[:32]
    return place.with_name(f".{stem}.quantkit-{use}")


def beside(place: Path, use: str) -> Path:
    name = hidden(place, use)
    return name.with_name(f"{name.name}-{secrets.token_hex(TOKEN_BYTES)}")


def make_folder(place: Path) -> Path:
    """A new folder beside the place; unlike mkdtemp's, its permissions are those that the user's umask gives."""
    while True:
        work = beside(place, "new")
        try:
            work.mkdir()
        except FileExistsError:
            continue
        return work


def clear_leftovers(place: Path) -> None:
    """Remove what a killed writer of this place left; called under the lock, so no living one has made it.

    Where the killed one had moved the old result aside and not yet the new one in, the old one is put back.
    """
    for use in ("old", "new"):
        pattern = re.compile(re.escape(hidden(place, use).name) + f"-[0-9a-f]{{{2 * TOKEN_BYTES}}}")
        names = sorted(entry.name for entry in os.scandir(place.parent) if pattern.fullmatch(entry.name))
        for left in map(place.with_name, names):
            if use == "old" and status(place) is None:
                left.rename(place)
            elif left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
