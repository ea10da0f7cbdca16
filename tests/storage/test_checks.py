"""Checks put together from smaller ones name the place that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from quantkit.errors import EvaluationError
from quantkit.storage.checks import (
    check_document,
    list_of,
    map_of,
    nullable,
    number,
    positive,
    record,
    text,
    whole,
    word,
)

PERSON = record({"name": word, "age": whole(0)}, {"size": nullable(positive)}, closed=True)
DOCUMENT = record({"people": map_of(PERSON), "scores": list_of(number, least=1, most=3)})
GOOD = {"people": {"a": {"name": "x", "age": 3, "size": None}}, "scores": [1, 2.5]}


def test_a_fitting_document_passes() -> None:
    check_document(GOOD, DOCUMENT, "doc", EvaluationError)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "it is .*, not a mapping"),
        ({"people": {}}, "it lacks 'scores'"),
        ({**GOOD, "scores": []}, "it.scores is .*, not a list of at least 1, at most 3"),
        ({**GOOD, "scores": [1, True]}, r"it.scores\[1\] is True, not a number"),
        ({**GOOD, "scores": [float("nan")]}, r"it.scores\[0\] is nan, not a number"),
        ({**GOOD, "scores": [10**400]}, "too large"),
        ({**GOOD, "people": {"a": {"name": " ", "age": 3}}}, "it.people.a.name is ' ', not a word"),
        ({**GOOD, "people": {"a": {"name": "x", "age": True}}}, "it.people.a.age is True, not a whole number"),
        ({**GOOD, "people": {"a": {"name": "x", "age": 3.0}}}, "it.people.a.age is 3.0, not a whole number"),
        ({**GOOD, "people": {"a": {"name": "x", "age": 3, "size": 0}}}, "it.people.a.size is 0, not a number above 0"),
        ({**GOOD, "people": {"a": {"name": "x", "age": 3, "hat": 1}}}, "it.people.a has the unknown key 'hat'"),
        ({**GOOD, "people": {1: {}}}, "a key of it.people is 1, not a text"),
    ],
    ids=[
        *(
            "list",
            "missing",
            "short",
            "bool",
            "nan",
            "huge",
            "blank",
            "bool-int",
            "float-int",
            "zero",
            "unknown",
            "key",
        ),
    ],
)
def test_what_does_not_fit_is_named(document: Any, message: str) -> None:
    with pytest.raises(EvaluationError, match=f"^doc is malformed.*{message}"):
        check_document(document, DOCUMENT, "doc", EvaluationError)


def test_a_key_that_is_open_takes_anything() -> None:
    check_document({"name": "x", "other": object()}, record({"name": text}), "doc", EvaluationError)
