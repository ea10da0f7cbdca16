"""Which steps of tuning are known to make the host wait for a GPU; torch's warning is given by hand here."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from quantkit.tuning.steps import _waits


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
