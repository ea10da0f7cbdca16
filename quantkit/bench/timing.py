"""How a time is measured before quantkit prints it.

On a GPU: one captured CUDA graph runs the call over a rotation of input sets that together exceed the L2 cache eight
times, so every call reads its weights from memory and no launch waits for Python; it is replayed at least 100 times or
for one second after a warm-up, between CUDA events. On the CPU: wall time of single calls, as many.
A time is only reported if the result was right and the implied traffic is possible: see Measurement and check_peak.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from quantkit.bench.nvml import sm_megahertz
from quantkit.cuda.architectures import Peaks, known_peaks
from quantkit.cuda.graph import Call, capture
from quantkit.errors import BenchError

MIN_REPEATS = 100
MIN_SECONDS = 1.0
WARM_UP_REPLAYS = 3
CALLS_PER_GRAPH = 16
L2_SHARE = 8  # the rotation's weights, in L2 caches
_ASSUMED_L2 = 64 << 20  # where torch does not know the size


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, 10th and 90th percentile over ``repeats`` timed repeats.

    sm_mhz: clock of a GPU's multiprocessors behind the last of them, None where NVML cannot say.
    """

    median: float
    p10: float
    p90: float
    repeats: int
    sm_mhz: int | None = None


def rotation_length(bytes_per_call: int, device: torch.device) -> int:
    """How many input sets make a rotation that L2 cannot hold; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", _ASSUMED_L2)
    return max(2, -(-L2_SHARE * l2 // max(1, bytes_per_call)))


def measure(calls: Sequence[Call], device: torch.device, *, min_repeats: int = MIN_REPEATS) -> Timing:
    """Time calls that do the same work on different copies of the inputs.

    device: cuda replays a graph of them, cpu calls them in turn. Returns the time of one call.
    """
    return _measure_cuda(calls, device, min_repeats) if device.type == "cuda" else _measure_cpu(calls, min_repeats)


def _measure_cuda(calls: Sequence[Call], device: torch.device, min_repeats: int) -> Timing:
    rounds = -(-CALLS_PER_GRAPH // len(calls))
    count = rounds * len(calls)
    graph = capture(list(calls) * rounds, device)
    with torch.cuda.device(device):
        for _ in range(WARM_UP_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        spans: list[float] = []
        started = time.perf_counter()
        while len(spans) < min_repeats and time.perf_counter() - started < MIN_SECONDS:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            spans.append(start.elapsed_time(end) / 1e3 / count)
        graph.replay()  # the clock is that of work without pause
        clock = sm_megahertz(device)
        torch.cuda.synchronize()
    return replace(_summary(spans), sm_mhz=clock)


def _measure_cpu(calls: Sequence[Call], min_repeats: int) -> Timing:
    calls[0]()
    spans: list[float] = []
    started = time.perf_counter()
    while len(spans) < min_repeats and time.perf_counter() - started < MIN_SECONDS:
        begin = time.perf_counter()
        calls[len(spans) % len(calls)]()
        spans.append(time.perf_counter() - begin)
    return _summary(spans)


def _summary(spans: Sequence[float]) -> Timing:
    p10, median, p90 = np.percentile(spans, (10, 50, 90))
    return Timing(float(median), float(p10), float(p90), len(spans))


def peak_bandwidth(device: torch.device) -> float | None:
    """Bytes per second that the device can read, or None where unknown (CPUs, other GPUs)."""
    peaks = device_peaks(device)
    return None if peaks is None else peaks.read_bandwidth


def device_peaks(device: torch.device) -> Peaks | None:
    """What the device can do at most, or None where unknown (CPUs, other GPUs)."""
    return known_peaks(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def check_peak(what: str, bandwidth: float, peak: float | None) -> None:
    """Raise BenchError for a bandwidth above what the device can read: the measurement must be wrong."""
    if peak is not None and bandwidth > peak:
        raise BenchError(
            f"{what}: {bandwidth / 1e9:.0f} GB/s is above this GPU's {peak / 1e9:.0f} GB/s; not a valid measurement"
        )


def check_result(what: str, error: float, tolerance: float) -> None:
    """Raise BenchError where a result is not close to the reference; NaN is not."""
    if not error <= tolerance:
        raise BenchError(
            f"{what}: relative error {error:.2e} against the reference, allowed {tolerance:.0e}; not timed"
        )
