"""Times of short bursts after pauses, beside those of quantkit.bench.timing, which last up to a second without pause.

Under a second of matrix products a GPU reaches its power limit and lowers its clocks; in a burst it has not yet. The
two together tell what the clocks cost from what a kernel costs. Cases take turns, so that all meet the same machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from quantkit.bench.nvml import sm_megahertz
from quantkit.cuda.graph import Call, capture

ROUNDS = 5
REPLAYS = 5
PAUSE_SECONDS = 0.15


@dataclass(frozen=True)
class Burst:
    """Seconds per call; sm_mhz: clock of the multiprocessors while the calls ran, None where NVML cannot say."""

    seconds: float
    sm_mhz: int | None


def measure_bursts(cases: Sequence[Sequence[Call]], device: torch.device) -> list[Burst]:
    """Time each case's calls, which do the same work on different copies of the inputs, on a GPU.

    A burst replays the graph of a case's calls once and then ``REPLAYS`` times between two events.
    """
    graphs = [(capture(calls, device), len(calls)) for calls in cases]
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        return take_turns([partial(_burst, graph, count, device) for graph, count in graphs])


def take_turns(bursts: Sequence[Callable[[], Burst]]) -> list[Burst]:
    """``ROUNDS`` rounds of all bursts, each after ``PAUSE_SECONDS`` of rest; the medians of each."""
    found: list[list[Burst]] = [[] for _ in bursts]
    for _ in range(ROUNDS):
        for burst, seen in zip(bursts, found, strict=True):
            time.sleep(PAUSE_SECONDS)
            seen.append(burst())
    return [_median(seen) for seen in found]


def _median(seen: Sequence[Burst]) -> Burst:
    clocks = [burst.sm_mhz for burst in seen if burst.sm_mhz is not None]
    return Burst(median(burst.seconds for burst in seen), round(median(clocks)) if clocks else None)


def _burst(graph: torch.cuda.CUDAGraph, count: int, device: torch.device) -> Burst:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    clock = sm_megahertz(device)
    end.synchronize()
    return Burst(start.elapsed_time(end) / 1e3 / count / REPLAYS, clock)
