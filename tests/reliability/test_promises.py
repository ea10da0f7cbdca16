"""docs/reliability.md names tests: every one of them is there, in the file that is named."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"
FILE_OR_TEST = re.compile(r"`([\w/]+\.py|test_\w+)`")


def named(text: str) -> list[tuple[str, str | None]]:
    """(file, test) as a text names them: a test is in the last file before it; None for a whole file."""
    pairs: list[tuple[str, str | None]] = []
    for word in FILE_OR_TEST.findall(text):
        pairs.append((word, None) if word.endswith(".py") else (pairs[-1][0], word))
    return pairs


def test_every_promise_names_tests_that_are_there() -> None:
    pairs = named(PAGE.read_text(encoding="utf-8"))
    assert len(pairs) > 50
    for file, test in pairs:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert test is None or f"def {test}(" in text, (file, test)


def test_every_promise_has_a_test() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    promises = [row for row in rows if not row.startswith(("| promise |", "| --- |"))]
    assert len(promises) > 25
    assert [row for row in promises if "| `" not in row] == []
