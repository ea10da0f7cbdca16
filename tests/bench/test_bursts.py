from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from quantkit.bench import bursts
from quantkit.bench.bursts import PAUSE_SECONDS, ROUNDS, Burst, measure_bursts, take_turns
from quantkit.bench.nvml import open_nvml, sm_megahertz
from quantkit.errors import BenchError

CALLS = 64
SHARED_GPU = 16  # other tests may use the GPU meanwhile; a time not divided by its calls would be 64 times too long


def test_bursts_take_turns_after_pauses_and_give_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(bursts.time, "sleep", lambda seconds: order.append(f"pause {seconds}"))

    def burst(name: str, seconds: list[float], clocks: list[int | None]) -> Callable[[], Burst]:
        def run() -> Burst:
            order.append(name)
            return Burst(seconds.pop(), clocks.pop())

        return run

    found = take_turns(
        [
            burst("a", [1.0, 9.0, 3.0, 2.0, 4.0], [1900, 1980, 1500, None, 1980]),
            burst("b", [5.0] * ROUNDS, [None] * ROUNDS),
        ]
    )
    pause = f"pause {PAUSE_SECONDS}"
    assert order == [pause, "a", pause, "b"] * ROUNDS
    assert found == [Burst(3.0, 1940), Burst(5.0, None)]


def test_without_nvidia_ml_py_there_is_no_clock_but_a_line_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sm_megahertz(torch.device("cuda")) is None
    with pytest.raises(BenchError, match=r"pip install 'quantkit\[energy\]'"):
        open_nvml(torch.device("cuda"))


@pytest.mark.cuda
def test_a_burst_is_timed_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bursts, "PAUSE_SECONDS", 0.0)
    device = torch.device("cuda")
    size = 256 << 20
    buffers = [torch.ones(size // 4, device=device) for _ in range(2)]
    few, many = measure_bursts([[buffers[0].sum], [buffer.sum for buffer in buffers] * (CALLS // 2)], device)
    assert 1e9 < size / few.seconds < 2e13
    assert few.seconds / SHARED_GPU < many.seconds < few.seconds * SHARED_GPU
