"""Counts in a GPU's memory by which the blocks of a launch wait for each other: zero before it, and again behind it.

The last to count begins again at zero (kernels/shared/counts.cuh), so the memory is cleared once, and not
for every launch. Two launches that may run at the same time must not share counts:

- launches on one stream follow each other and share those of their stream;
- a launch that a CUDA graph captures gets its own for good, as a graph may be replayed beside anything: a piece of
  memory that was cleared before. Where that is used up, the graph clears some in every replay.
"""

from __future__ import annotations

from functools import cache
from threading import Lock

import torch
from torch import Tensor

from quantkit.cuda.device import raw_stream

_STREAM_COUNTS = 1 << 10  # at least, of a stream
_CAPTURED_COUNTS = 1 << 21  # of a device, for all launches that are ever captured: 8 MiB


class Counts:
    """Those of one device; int32."""

    def __init__(self, device: torch.device, captured: int = _CAPTURED_COUNTS):
        self._device, self._lock, self._used = device, Lock(), 0
        self._streams: dict[int, Tensor] = {}
        self._captured = self._zeros(captured)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # what is captured may be replayed on other streams

    def of_stream(self, count: int, stream: int) -> Tensor:
        """At least so many, for a launch on a stream (its handle), which must be the current one."""
        counts = self._streams.get(stream)
        if counts is None or len(counts) < count:
            counts = self._streams[stream] = self._zeros(max(count, _STREAM_COUNTS))
        return counts

    def of_graph(self, count: int) -> Tensor:
        """So many, for a launch that is being captured."""
        with self._lock:
            first = self._used
            if first + count > len(self._captured):
                return self._zeros(count)
            self._used += count
        return self._captured[first : first + count]

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


@cache
def _of_device(index: int) -> Counts:
    return Counts(torch.device("cuda", index))


def zero_counts(count: int, device: torch.device) -> Tensor:
    """At least so many counts for a launch on the device's current stream, which leaves them at zero.

    The first call for a device must come before graph capture, as the first launch of a kernel must.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    counts = _of_device(index)
    if torch.cuda.is_current_stream_capturing():
        return counts.of_graph(count)
    return counts.of_stream(count, raw_stream(index))
