"""Long work in pieces that stay: what a run has finished, the next run of the same work goes on from.

Beside the place of a result, while it is being made, stands a hidden folder:

  identity.json              what the work is of: another model, recipe or version is other work
  piece-00007.safetensors    what piece 7 gave: tensors with their digests, and a document in the metadata
  state-00008                the tensor that piece 8 starts from, where pieces hand one on

A piece counts once its file stands under its name: it is written under another, through to the disk, and renamed. The
state that the next piece starts from is on the disk before, and its digest is in the piece's document. States that are
held in memory, as a GPU's are, are gigabytes that take longer to write than a piece to work out: they are saved now and
then (commits.py). A later run goes on from the last piece whose state was saved and makes those behind it again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import OutputError, refusing
from quantkit.progress import say, track
from quantkit.ranks import Ranks
from quantkit.storage.documents import parse_json, read_json
from quantkit.storage.output import sync
from quantkit.storage.place import hidden
from quantkit.storage.tensors import (
    TensorFile,
    Verification,
    raw_bytes,
    read_header,
    tensor_digest,
    write_at,
    write_tensors,
)

_IDENTITY = "identity.json"
_DOCUMENT = "quantkit.piece"
_AGAIN = "`restart` begins anew"
UNSAVED = "unsaved"
"""In the place of the digest of a state that was not saved."""
_COPYING = 8  # threads that write a state that is held in memory: one copies slower than a disk takes it


class Workspace:
    """The pieces of one work. finished: how many stand, from the first on. kept: as many a later run goes on behind.

    passing: whether no later run will find it, so that states held in memory need not be saved.
    """

    def __init__(self, folder: Path, finished: int, *, passing: bool = False):
        self.folder, self.finished, self.kept, self.passing = folder, finished, finished, passing

    def document(self, number: int) -> Any:
        """What was committed with a finished piece, beside its tensors."""
        return _document(self._header(number))["document"]

    def tensors(self) -> dict[str, TensorFile]:
        """Every tensor of the finished pieces, by name, with the file that holds it."""
        return {name: file for file in self.files() for name in file.tensors}

    def files(self) -> list[TensorFile]:
        """The headers of the finished pieces."""
        return [self._header(number) for number in range(self.finished)]

    def state(self, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that a piece starts from, as a file that is mapped into memory; new ones hold nothing yet.

        Its room on the disk is taken at once: a mapped file that finds the disk full would end the process.
        Raises OutputError where the disk is too full.
        """
        count = torch.Size(shape).numel()
        with refusing(f"hidden states in {self.folder} cannot be written", OutputError):
            descriptor = os.open(self._state(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                os.posix_fallocate(descriptor, 0, max(1, count * dtype.itemsize))
            finally:
                os.close(descriptor)
        mapped = torch.from_file(str(self._state(number)), shared=True, size=count, dtype=dtype)
        return mapped.view(shape)

    def discard(self, number: int) -> None:
        """Remove what ``state`` made; the tensor stays while it is held."""
        self._state(number).unlink(missing_ok=True)

    def seal_state(self, number: int, state: Tensor) -> str:
        """The digest of a state that ``state`` made and that is complete, once it is on the disk."""
        with refusing(f"unfinished work in {self.folder} cannot be written", OutputError):
            sync(self._state(number))
            return _state_digest(state)

    def save_rows(self, number: int, state: Tensor, rows: Sequence[int]) -> dict[int, str]:
        """Write rows of a state that is held in memory, on any device, to its file; the digest of each.

        Raises OutputError where the disk does not take them.
        """
        with refusing(f"hidden states in {self.folder} cannot be written", OutputError):
            descriptor = os.open(self._state(number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                with ThreadPoolExecutor(_COPYING) as pool:
                    digests = list(pool.map(partial(_save_row, descriptor, state), rows))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        return dict(zip(rows, digests, strict=True))

    def commit(self, tensors: Mapping[str, Tensor], document: Any, state: str | None = None) -> None:
        """Finish the next piece. state: the digest of what the piece behind it starts from; None where it needs none.

        Raises OutputError where the disk does not take it.
        """
        number = self.finished
        with refusing(f"unfinished work in {self.folder} cannot be written", OutputError):
            held = {"document": document, "state": state}
            new = self.folder / "piece.new"
            new.unlink(missing_ok=True)
            write_tensors(new, tensors, {_DOCUMENT: json.dumps(held)})
            sync(new)
            new.rename(self.piece(number))
            sync(self.folder)
            self.finished += 1
            if state != UNSAVED:
                self.kept = self.finished
                self._discard_to(number)

    def check_state(self, state: Tensor) -> None:
        """Raise OutputError unless the state is what the last finished piece left."""
        if self._handed_on(self.finished - 1) != _state_digest(state):
            raise OutputError(f"unfinished work in {self.folder}: its state is not what was written; {_AGAIN}")

    def go_back(self) -> None:
        """Drop the pieces behind the last one that a run goes on behind."""
        while self.finished and self._handed_on(self.finished - 1) == UNSAVED:
            self.finished -= 1
            self.piece(self.finished).unlink()
        self.kept = self.finished

    def _handed_on(self, number: int) -> Any:
        return _document(self._header(number))["state"]

    def _discard_to(self, number: int) -> None:
        for earlier in self.folder.glob("state-*"):
            if int(earlier.name.removeprefix("state-")) <= number:
                earlier.unlink()

    def piece(self, number: int) -> Path:
        """The file of a finished piece."""
        return self.folder / f"piece-{number:05}.safetensors"

    def _state(self, number: int) -> Path:
        return self.folder / f"state-{number:05}"

    def _header(self, number: int) -> TensorFile:
        return read_header(self.piece(number), f"unfinished work in {self.folder}", OutputError, _AGAIN)


@contextmanager
def workspace(place: Path, identity: Mapping[str, Any], *, restart: bool) -> Iterator[Workspace]:
    """The work that leads to the result at ``place``, whose lock the caller holds.

    identity: what the work is of, JSON values by name. restart: whether finished pieces of an earlier run are dropped.
    Left in order the folder is removed; after an error it stays where a piece is finished, and a line says so.
    Raises OutputError where an earlier run was of other work, or what it left was altered.
    """
    folder = hidden(place, "work")
    with refusing(f"unfinished work in {folder} cannot be written", OutputError):
        finished = 0 if restart else _finished_pieces(folder, identity)
        if not finished:
            _make(folder, identity)
    work = Workspace(folder, finished)
    if finished:
        say(f"going on with the work of an earlier run: {finished} pieces are finished ({folder})")
    try:
        yield work
    except BaseException:
        if work.kept:
            say(f"{work.kept} finished pieces stay in {folder}; run the same command again to go on, or remove it")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def shared_workspace(ranks: Ranks, opened: Callable[[], AbstractContextManager[Workspace]]) -> Iterator[Workspace]:
    """The workspace that the first rank opens, on all ranks: the others read and fill its files."""
    with ExitStack() as stack:
        own: list[Workspace] = []

        def enter() -> tuple[Path, int]:
            own.append(stack.enter_context(opened()))
            return own[0].folder, own[0].finished

        folder, finished = ranks.lead(enter)
        yield own[0] if own else Workspace(folder, finished)


@contextmanager
def passing_workspace(_identity: Mapping[str, Any]) -> Iterator[Workspace]:
    """A workspace that no later run finds."""
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        yield Workspace(Path(folder), 0, passing=True)


def _finished_pieces(folder: Path, identity: Mapping[str, Any]) -> int:
    """How many pieces stand, each compared with its digests; 0 where there is nothing to go on from."""
    work = Workspace(folder, 0)
    while work.piece(work.finished).is_file():
        work.finished += 1
    if not work.finished:
        return 0
    found = read_json(folder / _IDENTITY, f"unfinished work in {folder}", OutputError)
    wanted = json.loads(json.dumps(identity))
    if not isinstance(found, dict) or found != wanted:
        other = sorted(key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key])
        what = " and ".join(other) or "kind"
        raise OutputError(
            f"an earlier run left {work.finished} finished pieces of work with another {what} in {folder}; "
            f"{_AGAIN}, or choose another output"
        )
    files = work.files()
    compared = sum(
        Verification([file], OutputError).finish()
        for file in track(files, "comparing finished pieces with their digests")
    )
    if compared != sum(len(file.tensors) for file in files):
        raise OutputError(f"unfinished work in {folder}: its pieces hold no digests; {_AGAIN}")
    work.go_back()
    return work.finished


def _make(folder: Path, identity: Mapping[str, Any]) -> None:
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / _IDENTITY).write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
    sync(folder / _IDENTITY)


def _document(file: TensorFile) -> Any:
    return parse_json(file.metadata.get(_DOCUMENT, "null"), f"unfinished work: {file.path}", OutputError)


def _save_row(descriptor: int, state: Tensor, number: int) -> str:
    """Write one row to its place in the file; its digest. A GPU's comes on a stream of its own."""
    row = state[number]
    if row.is_cuda:
        with torch.cuda.device(state.device), torch.cuda.stream(torch.cuda.Stream(state.device)):
            row = torch.empty(row.shape, dtype=row.dtype, pin_memory=True).copy_(row, non_blocking=True)
            torch.cuda.current_stream(state.device).synchronize()
    write_at(descriptor, raw_bytes(row), number * row.numel() * row.itemsize)
    return tensor_digest(row)


def _state_digest(state: Tensor) -> str:
    """One digest of the digests of the state's rows, which several threads take."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return digest_of_rows(pool.map(tensor_digest, state.unbind()))


def digest_of_rows(digests: Iterable[str]) -> str:
    """The digest of a state whose rows have these."""
    return sha256("".join(digests).encode()).hexdigest()
