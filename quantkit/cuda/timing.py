"""Device time that a call adds behind another, L2 cold, for choosing between kernels; bench/ has the full rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

_WARM_UP, _REPEATS = 2, 15
_FLUSH_FACTOR = 2
_LEAD = 8  # flushes before a span: a fifth of a millisecond in which the host gets ahead, so no launch is waited for


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
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        for _ in range(_WARM_UP):
            before()
            call()
        pairs = [(_span((before,), device), _span((before, call), device)) for _ in range(_REPEATS)]
        torch.cuda.synchronize()
        alone, both = (median(start.elapsed_time(end) for start, end in spans) for spans in zip(*pairs, strict=True))
    return max(both - alone, 0.0) / 1e3


def _span(calls: Sequence[Callable[[], Any]], device: torch.device) -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(_LEAD):
        flush_l2(device)
    start.record()
    for call in calls:
        call()
    end.record()
    return start, end
