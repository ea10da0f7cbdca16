"""Reading JSON and YAML that others may have written: regular files of bounded size and depth, every key once.

Each function raises the given kind of QuantkitError, in one line that starts with ``what``, for whatever is wrong.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import QuantkitError, refusing

MAX_JSON_BYTES = 1 << 28  # a plan's document or a tokenizer's index of a large model takes some 10 MB
MAX_YAML_BYTES = 1 << 20  # a plan of 1000 layers takes 100 kB; PyYAML takes seconds for a megabyte
MAX_DEPTH = 32
MAX_INTEGER_BITS = 1000  # tokenizer_config.json holds 10**30 for no limit; floats end at 1024
_ALIASES = "aliases (*name) are not read: one line of them can stand for a billion values"


def read_text(path: Path, what: str, kind: type[QuantkitError], hint: str = "", *, limit: int = MAX_JSON_BYTES) -> str:
    """A file's text in UTF-8; a pipe, a device or a folder is refused, as is more than ``limit`` bytes."""
    with refusing(f"{what} cannot be read", kind, hint):
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        if path.stat().st_size > limit:
            raise ValueError(f"{path.stat().st_size} bytes are more than the {limit} that are read")
        return path.read_text(encoding="utf-8")


def read_json(path: Path, what: str, kind: type[QuantkitError], hint: str = "") -> Any:
    """A JSON file; a key that stands twice in one mapping is refused.

    NaN and Infinity are floats, for checks to refuse: quantkit writes them where a measured ratio is infinite.
    """
    return parse_json(read_text(path, what, kind, hint), what, kind, hint)


def parse_json(text: str, what: str, kind: type[QuantkitError], hint: str = "") -> Any:
    """The value of a JSON text, as read_json reads it."""
    with refusing(f"{what} cannot be read", kind, hint):
        value = json.loads(text, object_pairs_hook=_mapping, parse_int=_integer)
        _check_depth(value, MAX_DEPTH)
        return value


def read_yaml(path: Path, what: str, kind: type[QuantkitError]) -> Any:
    """A YAML file of plain values; aliases, tags of objects and a key that stands twice are refused."""
    return parse_yaml(read_text(path, what, kind, limit=MAX_YAML_BYTES), what, kind)


def parse_yaml(text: str, what: str, kind: type[QuantkitError]) -> Any:
    """The value of a YAML text, as read_yaml reads it."""
    with refusing(f"{what} cannot be read", kind):
        try:
            return yaml.load(text, _Loader)
        except yaml.MarkedYAMLError as error:
            place = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
            raise ValueError(f"{place}{error.problem}") from error


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise ValueError(f"the key {name!r} stands twice")
        mapping[name] = value
    return mapping


def _integer(text: str) -> int:
    return _bounded(int(text))


def _bounded(number: int) -> int:
    if number.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(f"it holds an integer of {number.bit_length()} bits")
    return number


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        if isinstance(child, dict | list):
            _check_depth(child, left - 1)


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases and merge keys, of bounded depth, that takes every key of a mapping once."""

    def __init__(self, stream: str):
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError(_ALIASES)
        if self._depth == MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise ValueError(f"line {key.start_mark.line + 1}: a key is one plain word")
            if key.value in names:
                raise ValueError(f"line {key.start_mark.line + 1}: the key {key.value!r} stands twice")
            names.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_yaml_int(self, node: Any) -> int:
        return _bounded(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
