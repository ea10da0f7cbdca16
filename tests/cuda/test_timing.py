"""How calls are timed to choose between kernels, on a GPU and a host that are simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from quantkit.cuda import timing
from quantkit.cuda.timing import cold_seconds

CPU = torch.device("cpu")
GIGAHERTZ = 1.7


class Machine:
    """Clocks in microseconds: what is queued takes the host ``launch``, and the GPU works it off in order."""

    def __init__(self, launch: float):
        self.launch, self.host, self.gpu = launch, 0.0, 0.0

    def queue(self, duration: float) -> None:
        self.host += self.launch
        self.gpu = max(self.gpu, self.host) + duration

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(time=0.0)

        def record() -> None:
            self.queue(0.0)
            event.time = self.gpu

        event.record, event.query = record, lambda: self.host >= event.time
        event.elapsed_time = lambda end: (end.time - event.time) / 1e3
        return event

    def wait(self) -> None:
        self.host = max(self.host, self.gpu)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Machine]:
    """Call it with the time that a launch takes the host."""

    @contextmanager
    def device(_: torch.device) -> Iterator[None]:
        yield

    def simulated(launch: float) -> Machine:
        made = Machine(launch)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "Event", made.event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.queue(cycles / GIGAHERTZ / 1e3))
        monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
        monkeypatch.setattr(timing, "flush_l2", lambda _: made.queue(25.0))
        return made

    return simulated


@pytest.mark.parametrize("launch", [1.0, 20.0, 300.0, 2000.0], ids="{:.0f}us".format)
def test_a_slow_host_does_not_count(machine: Callable[[float], Machine], launch: float) -> None:
    made = machine(launch)
    seconds = cold_seconds(lambda: made.queue(5.0), lambda: made.queue(8.0), CPU)
    assert seconds == pytest.approx(8e-6, rel=1e-6)


def test_a_host_that_is_hopeless_ends_all_the_same(machine: Callable[[float], Machine]) -> None:
    made = machine(1e5)
    assert cold_seconds(lambda: made.queue(5.0), lambda: made.queue(8.0), CPU) >= 8e-6
