"""Committing the pieces of a long work one after the other, beside what is worked on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import OutputError
from quantkit.ranks import Ranks
from quantkit.storage.resume import UNSAVED, Workspace, digest_of_rows

SAVE_SECONDS = 30.0
"""Between two saves of states that are held in memory: what is worked out again after a run was cut short."""
_BEHIND = 2  # pieces that may wait to be written while a state is


class Commits:
    """Commits pieces one after the other; with a GPU in a thread, while the next ones are worked on.

    Every rank hands in each piece. The first one writes it, when all have written their windows of its state.
    """

    def __init__(self, work: Workspace, ranks: Ranks, device: torch.device):
        self._work, self._ranks, self._device, self._number = work, ranks, device, work.finished
        self._pool = ThreadPoolExecutor(1) if device.type == "cuda" else None
        self._pending: deque[Future[None]] = deque()
        self._saved = time.monotonic()

    def __enter__(self) -> Commits:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: Any, _trace: Any) -> None:
        try:
            with nullcontext() if kind is None else suppress(OutputError):  # the first error is what is told
                self._wait(0)
        finally:
            if self._pool is not None:
                self._pool.shutdown()

    def commit(self, tensors: Mapping[str, Tensor], document: Any, state: Tensor | None = None) -> None:
        """Finish the next piece, on the CPU. state: what the piece behind it starts from, in its file or in memory.

        Raises OutputError where the disk does not take this piece or one before.
        """
        self._wait(_BEHIND)
        self._number += 1
        seal = self._sealing(state)
        if not self._ranks.leads:
            self._work.finished += 1
        elif self._pool is None:
            self._work.commit(tensors, document, seal())
        else:
            before = self._pending[-1] if self._pending else None
            self._pending.append(self._pool.submit(self._write, before, tensors, document, seal))

    def _write(
        self, before: Future[None] | None, tensors: Mapping[str, Tensor], document: Any, seal: Callable[[], str | None]
    ) -> None:
        if before is not None:
            before.result()  # where that piece could not be written, this one must not take its number
        self._work.commit(tensors, document, seal())

    def _sealing(self, state: Tensor | None) -> Callable[[], str | None]:
        """What gives, on the first rank, the digest of a state that is on the disk by then, or says that it is not."""
        number, ranks = self._number, self._ranks
        if state is None or _is_mapped(state):
            ranks.collect(None)  # all have written their windows
            return lambda: None if state is None else self._work.seal_state(number, state)
        if self._work.passing or not ranks.lead(lambda: time.monotonic() - self._saved >= SAVE_SECONDS):
            return lambda: UNSAVED
        self._saved = inf  # until it is
        save = partial(self._save, number, state, _made(state))
        if ranks.count == 1:
            return lambda: _joined([save()])
        found = ranks.collect(save())
        return lambda: _joined(found)

    def _save(self, number: int, state: Tensor, made: Callable[[], None]) -> dict[int, str]:
        """Write this rank's windows of a state; the digest of each."""
        made()
        digests = self._work.save_rows(number, state, self._ranks.own(len(state)))
        self._saved = time.monotonic()
        return digests

    def _wait(self, most: int) -> None:
        """Until so many pieces are left to write. Raises OutputError where the disk did not take one."""
        while len(self._pending) > most:
            self._pending.popleft().result()


def _made(state: Tensor) -> Callable[[], None]:
    """What waits, in any thread, until all is done that this one has asked the state's GPU for so far."""
    if not state.is_cuda:
        return lambda: None
    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(state.device))
    return lambda: made.synchronize()


def _is_mapped(state: Tensor) -> bool:
    return state.device.type == "cpu" and state.untyped_storage().filename is not None


def _joined(found: Sequence[Mapping[int, str]]) -> str:
    """One digest of those of all rows, which the ranks took."""
    rows = {number: digest for own in found for number, digest in own.items()}
    return digest_of_rows(rows[number] for number in sorted(rows))
