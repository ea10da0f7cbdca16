"""Device time of one call with a cold L2 cache, for choosing between kernels; bench/ holds the full rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

_WARM_UP, _REPEATS = 2, 7
_FLUSH_FACTOR = 2
_LEAD = 32  # flushes queued first: about a millisecond in which the host gets ahead, so that no launch is waited for


@cache
def _flush_buffer(device: torch.device) -> Tensor:
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(_FLUSH_FACTOR * size, dtype=torch.uint8, device=device)


def flush_l2(device: torch.device) -> None:
    """Queue a write over twice the L2 cache, so that the next kernel reads its inputs from memory."""
    _flush_buffer(device).zero_()


def cold_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median device time of ``call`` over a few runs, L2 flushed before each."""
    with torch.cuda.device(device):
        for _ in range(_WARM_UP):
            call()
        for _ in range(_LEAD):
            flush_l2(device)
        spans = []
        for _ in range(_REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush_l2(device)
            start.record()
            call()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in spans) / 1e3
