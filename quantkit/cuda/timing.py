"""Device time that a call adds behind another, L2 cold, for choosing between kernels; bench/ has the full rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

_Span = tuple[Any, Any]  # events around it

_WARM_UP, _REPEATS = 2, 15
_FLUSH_FACTOR = 2
_LEAD_CYCLES, _MOST_LEAD_CYCLES = 1 << 19, 1 << 25  # of waiting before a span: a third of a millisecond to 20


@cache
def _flush_buffer(device: torch.device) -> Tensor:
    size = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(_FLUSH_FACTOR * size, dtype=torch.uint8, device=device)


def flush_l2(device: torch.device) -> None:
    """Queue a write over twice the L2 cache, so that the next kernel reads its inputs from memory."""
    _flush_buffer(device).zero_()


def cold_seconds(before: Callable[[], Any], call: Callable[[], Any], device: torch.device) -> float:
    """Median device time that ``call`` adds to ``before``, after a flush of L2.

    before: the same work on other memory. In a model kernels follow each other, and what they hide of each other's
    launches and first reads is as long as a small product.
    """
    spans: tuple[list[_Span], list[_Span]] = ([], [])
    lead = _LEAD_CYCLES
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for _ in range(_WARM_UP):
            before()
            call()
        for _ in range(_REPEATS):
            for kept, calls in zip(spans, ((before,), (before, call)), strict=True):
                span, lead = _queued(calls, device, lead)
                kept.append(span)
        torch.cuda.synchronize()
        alone, both = (median(start.elapsed_time(end) for start, end in kept) for kept in spans)
    return max(both - alone, 0.0) / 1e3


def _queued(calls: Sequence[Callable[[], Any]], device: torch.device, lead: int) -> tuple[_Span, int]:
    """Events around the calls, and the cycles of waiting before them with which the host kept ahead of the GPU.

    A span that the GPU could begin before all of it was queued holds the time of launches on the host, which on a busy
    host is several times a product's: it is queued again with twice the lead.
    """
    while True:
        ready, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda._sleep(lead)
        ready.record()
        flush_l2(device)
        start.record()
        for call in calls:
            call()
        end.record()
        if lead >= _MOST_LEAD_CYCLES or not ready.query():
            return (start, end), lead
        lead *= 2
