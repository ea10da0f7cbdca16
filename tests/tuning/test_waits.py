"""Which steps of tuning are known to make the host wait for a GPU, and what is captured of those: by hand, on a CPU."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.tuning import steps
from quantkit.tuning.settings import TuneSettings
from quantkit.tuning.steps import _waits
from quantkit.tuning.whole_model import tune_model
from tests.tuning.test_whole_model import models, text


@pytest.fixture(autouse=True)
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """The modes that torch's check was set to."""
    found: list[str | int] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def wait() -> None:
    warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


def in_a_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_step_that_waits_is_told_and_taken_once(modes: list[str | int]) -> None:
    taken: list[int] = []
    assert _waits(lambda: (taken.append(1), wait(), wait())[1])
    assert taken == [1]
    assert modes == ["warn", 0]


def test_waiting_of_another_thread_is_none_of_the_step() -> None:
    with warnings.catch_warnings(record=True) as shown:
        assert not _waits(lambda: in_a_thread(wait))
    assert not shown


def test_other_warnings_are_shown() -> None:
    with pytest.warns(UserWarning, match="of something else"):
        assert not _waits(lambda: warnings.warn("of something else", stacklevel=1))


def test_a_step_that_fails_leaves_the_mode_as_it_was(modes: list[str | int]) -> None:
    def fail() -> None:
        raise ValueError("no step")

    shown = warnings.showwarning
    with pytest.raises(ValueError, match="no step"):
        _waits(fail)
    assert modes == ["warn", 0]
    assert warnings.showwarning is shown


class Replayed:
    """What a CUDA graph does, call by call."""

    def __init__(self, calls: list[Callable[[], None]]):
        self._calls = calls

    def replay(self) -> None:
        for call in self._calls:
            call()


@pytest.mark.parametrize("family", ["qwen3_moe", "opt"])
def test_a_step_in_two_parts_gives_what_it_gives_as_a_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TuneSettings(epochs=2, batch=3, rate=0.01, code_rate=0.01, codes=True, embeddings=True)
    updates: dict[int, steps._Update] = {}

    def in_two(step: steps._Step, batch: Tensor) -> None:
        if id(step) not in updates:
            updates[id(step)] = steps._Update(step)
        updates[id(step)].take(batch)

    found = []
    for changed in (False, True):
        if changed:
            monkeypatch.setattr(steps, "capture", lambda calls, _device, warm_up: Replayed(calls))
            monkeypatch.setattr(steps._Step, "take", in_two)
        torch.manual_seed(1)
        original, model = models(family)
        report = tune_model(original, model, text(), settings, dtype=torch.float32)
        assert report.kept > 0
        found.append((report, model.state_dict()))
    assert updates
    (whole, state), (in_parts, other) = found
    assert whole == in_parts
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name
