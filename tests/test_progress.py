"""Progress where stderr is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit import progress
from tests.cli.calls import run


def test_a_line_comes_while_one_item_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    for number in progress.track(range(3), "work"):
        if number == 1:
            time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("quantkit: work: 1 of 3 done in 0:00:0") for line in lines)
    assert "left" in lines[0]


def test_a_caller_may_ask_for_lines_more_often(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in progress.track(range(1), "work", every=0.05):
        time.sleep(0.5)
    assert "work: 0 of 1 done" in capsys.readouterr().err


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.track(iter("abc"), "work")) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_every_long_part_of_quantizing_tells_how_far_it_is(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def tell(items: Iterable[Any], description: str, _total: int | None, _seconds: float) -> Iterator[Any]:
        told.append(description)
        yield from items

    monkeypatch.setattr(progress, "_tell", tell)
    assert run("quantize", tiny_model("opt"), "--recipe", "rtn-w4-g128", "-o", tmp_path / "q").exit_code == 0
    assert told == ["reading the weights", "quantizing blocks", "writing the weight files"]
