"""Energy of a call, from the GPU's own counter (nuQmm Table 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.bench.nvml import open_nvml
from quantkit.bench.timing import CALLS_PER_GRAPH
from quantkit.cuda.graph import capture
from quantkit.errors import BenchError

MIN_SECONDS = 1.0
_REPLAYS_AT_ONCE = 20


@dataclass(frozen=True)
class Energy:
    """Of one call, over at least a second of repeats: millijoules; watts drawn meanwhile; NVML's utilisation, %."""

    millijoules: float
    watts: float
    gpu_percent: int
    memory_percent: int


def energy_per_call(calls: Sequence[Callable[[], Any]], device: torch.device) -> Energy:
    """Replay a graph of the calls for a second or more between two readings of the total-energy counter.

    Raises BenchError on the CPU, without nvidia-ml-py, or where the driver offers no counter.
    """
    if device.type != "cuda":
        raise BenchError("`energy` reads the GPU's counter; use `device` cuda")
    pynvml, handle = open_nvml(device)
    rounds = -(-CALLS_PER_GRAPH // len(calls))
    graph = capture(list(calls) * rounds, device)
    try:
        graph.replay()
        torch.cuda.synchronize(device)
        replays, started, before = 0, time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        while time.perf_counter() - started < MIN_SECONDS:
            for _ in range(_REPLAYS_AT_ONCE):
                graph.replay()
            torch.cuda.synchronize(device)
            replays += _REPLAYS_AT_ONCE
        used = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before
        seconds, busy = time.perf_counter() - started, pynvml.nvmlDeviceGetUtilizationRates(handle)
    except pynvml.NVMLError as error:
        raise BenchError(f"`energy`: NVML gives no reading on this GPU ({error})") from error
    count = replays * rounds * len(calls)
    return Energy(used / count, used / 1e3 / seconds, busy.gpu, busy.memory)
