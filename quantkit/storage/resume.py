"""Long work in pieces that stay: what a run has finished, the next run of the same work goes on from.

Beside the place of a result, while it is being made, stands a hidden folder:

  identity.json              what the work is of: another model, recipe or version is other work
  piece-00007.safetensors    what piece 7 gave: tensors with their digests, and a document in the metadata
  state-00008                the tensor that piece 8 starts from, where pieces hand one on

A piece counts once its file stands under its name: it is written under another, through to the disk, and renamed. The
state that the next piece starts from is on the disk before, and its digest is in the piece's document.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
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
from quantkit.storage.tensors import TensorFile, Verification, read_header, tensor_digest, write_tensors

_IDENTITY = "identity.json"
_DOCUMENT = "quantkit.piece"
_AGAIN = "`restart` begins anew"
_COPYING = 4  # threads that copy a GPU's state to its file


class Workspace:
    """The pieces of one work. finished: how many stand, from the first on."""

    def __init__(self, folder: Path, finished: int):
        self.folder, self.finished = folder, finished

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

    def commit(self, tensors: Mapping[str, Tensor], document: Any, state: Tensor | None = None) -> None:
        """Finish the next piece. state: what the piece behind it starts from, made by ``state``.

        Raises OutputError where the disk does not take it.
        """
        number = self.finished
        with refusing(f"unfinished work in {self.folder} cannot be written", OutputError):
            digest = None
            if state is not None:
                sync(self._state(number + 1))
                digest = _state_digest(state)
            held = {"document": document, "state": digest}
            new = self.folder / "piece.new"
            new.unlink(missing_ok=True)
            write_tensors(new, tensors, {_DOCUMENT: json.dumps(held)})
            sync(new)
            new.rename(self.piece(number))
            sync(self.folder)
            self.finished += 1
            self.discard(number)

    def check_state(self, state: Tensor) -> None:
        """Raise OutputError unless the state is what the last finished piece left."""
        if _document(self._header(self.finished - 1))["state"] != _state_digest(state):
            raise OutputError(f"unfinished work in {self.folder}: its state is not what was written; {_AGAIN}")

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
        if work.finished:
            say(f"{work.finished} finished pieces stay in {folder}; run the same command again to go on, or remove it")
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


class Commits:
    """Commits pieces one after the other; with a GPU in a thread, while the next is worked on.

    Every rank hands in each piece. The first one writes it, when all have written their windows of its state.
    """

    def __init__(self, work: Workspace, ranks: Ranks, device: torch.device):
        self._work, self._ranks, self._device, self._number = work, ranks, device, work.finished
        self._pool = ThreadPoolExecutor(1) if device.type == "cuda" else None
        self._pending: Future[None] | None = None

    def __enter__(self) -> Commits:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: Any, _trace: Any) -> None:
        try:
            with nullcontext() if kind is None else suppress(OutputError):  # the first error is what is told
                self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def commit(self, tensors: Mapping[str, Tensor], document: Any, state: Tensor | None = None) -> None:
        """Finish the next piece, on the CPU. state: what the piece behind it starts from, on the GPU or in its file.

        Raises OutputError where the disk does not take this piece or the one before.
        """
        self.wait()
        self._number += 1
        place = state
        if state is not None and state.device.type != "cpu":
            place = self._work.state(self._number, tuple(state.shape), state.dtype)
        if place is not state and self._ranks.count > 1:
            self._fill(place, state, None)
            state = place
        self._ranks.collect(None)
        if not self._ranks.leads:
            self._work.finished += 1
        elif self._pool is None:
            self._work.commit(tensors, document, place)
        else:
            written = torch.cuda.Event()
            written.record(torch.cuda.current_stream(self._device))
            self._pending = self._pool.submit(self._write, tensors, document, place, state, written)

    def wait(self) -> None:
        """Until the last piece is finished. Raises OutputError where the disk did not take it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(
        self, tensors: Mapping[str, Tensor], document: Any, place: Tensor | None, state: Tensor | None, written: Any
    ) -> None:
        if place is not state:
            self._fill(place, state, written)
        self._work.commit(tensors, document, place)

    def _fill(self, place: Tensor | None, state: Tensor | None, written: Any) -> None:
        """Copy this rank's windows to their file, beside what else the GPU does."""
        assert place is not None
        assert state is not None
        if written is None:
            torch.cuda.synchronize(self._device)
        else:
            written.synchronize()
        copied = partial(_copy_window, place, state)
        with ThreadPoolExecutor(_COPYING) as pool:  # one thread fills a mapped file slower than a disk takes it
            list(pool.map(copied, self._ranks.own(len(state))))


def _copy_window(place: Tensor, state: Tensor, number: int) -> None:
    """One window of a GPU's state to its file, on a stream of its own and through memory that the GPU writes to."""
    with torch.cuda.device(state.device), torch.cuda.stream(torch.cuda.Stream(state.device)):
        held = torch.empty(state.shape[1:], dtype=state.dtype, pin_memory=True)
        held.copy_(state[number], non_blocking=True)
        torch.cuda.current_stream(state.device).synchronize()
        place[number].copy_(held)


@contextmanager
def passing_workspace(_identity: Mapping[str, Any]) -> Iterator[Workspace]:
    """A workspace that no later run finds."""
    with tempfile.TemporaryDirectory(prefix="quantkit-") as folder:
        yield Workspace(Path(folder), 0)


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


def _state_digest(state: Tensor) -> str:
    """One digest of the digests of the state's rows, which several threads take."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return sha256("".join(pool.map(tensor_digest, state.unbind())).encode()).hexdigest()
