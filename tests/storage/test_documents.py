"""JSON and YAML of strangers: plain values come through, traps are refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quantkit.errors import RecipeError
from quantkit.storage.documents import MAX_YAML_BYTES, parse_json, parse_yaml, read_json, read_text, read_yaml


def _refusal(call: object, *arguments: object) -> str:
    with pytest.raises(RecipeError) as caught:
        call(*arguments, "recipe x", RecipeError)  # type: ignore[operator]
    assert str(caught.value).startswith("recipe x cannot be read (")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_values_come_through() -> None:
    values = {"a": [1, 2.5, True, None, "x"], "b": {"c": -3}}
    assert parse_yaml("a: [1, 2.5, true, null, x]\nb: {c: -3}\n", "it", RecipeError) == values
    assert parse_json('{"a": [1, 2.5, true, null, "x"], "b": {"c": -3}}', "it", RecipeError) == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: &x {b: *x}", "aliases"),
        ("a: 1\na: 2", "line 2: the key 'a' stands twice"),
        ("s:\n  a: 1\n  'a': 2", "line 3: the key 'a' stands twice"),
        ("<<: {a: 1}", "a key is one plain word"),
        ("? [1, 2]\n: 3", "a key is one plain word"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: " + "[" * 3000 + "]" * 3000, "nested more than 32 deep"),
        ("a: 0x" + "f" * 6000, "an integer of 24000 bits"),
        ("a: b: c", "line 1"),
        ("a: \x00", "special characters"),
    ],
    ids=["alias", "loop", "twice", "twice-quoted", "merge", "list-key", "object", "depth", "hex", "syntax", "control"],
)
def test_traps_in_yaml_are_refused(text: str, message: str) -> None:
    assert message in _refusal(parse_yaml, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("[" * 100_000, "Recursion"),
        ('{"a":' * 40 + "1" + "}" * 40, "nested more than 32 deep"),
        ("9" * 5000, "4300 digits"),
        ("9" * 4000, "an integer of 13288 bits"),
        ("{", "Expecting"),
    ],
    ids=["twice", "deep", "deeper-than-read", "digits", "bits", "syntax"],
)
def test_traps_in_json_are_refused(text: str, message: str) -> None:
    assert message in _refusal(parse_json, text)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "no regular file" in _refusal(read_yaml, tmp_path / "pipe.yaml")
    assert "no regular file" in _refusal(read_json, Path("/dev/zero"))
    assert "no regular file" in _refusal(read_json, tmp_path)
    assert "No such file" in _refusal(read_json, tmp_path / "none.json")


def test_large_files_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(MAX_YAML_BYTES + 1)
    assert "bytes are more than" in _refusal(read_yaml, tmp_path / "large.yaml")


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"a": "\xff"}')
    assert "utf-8" in _refusal(read_text, tmp_path / "a.json")
