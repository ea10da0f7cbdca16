"""What a document must look like, said once as data: checks that are put together from smaller ones.

A check takes a value and where it stands, and raises ValueError, naming the place, for a value that does not fit.
True and False are no numbers, and NaN and Infinity are none either.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from quantkit.errors import QuantkitError, refusing

Check = Callable[[Any, str], None]
Fields = Mapping[str, Check]


def check_document(value: Any, check: Check, what: str, kind: type[QuantkitError], hint: str = "") -> None:
    """Raise ``kind``, in one line that starts with ``what``, unless the value fits."""
    with refusing(f"{what} is malformed", kind, hint):
        check(value, "it")


def anything(_value: Any, _where: str) -> None:
    """Fits every value."""


def text(value: Any, where: str) -> None:
    """Fits a string."""
    _require(isinstance(value, str), where, "a text", value)


def word(value: Any, where: str) -> None:
    """Fits a string that is not blank."""
    _require(isinstance(value, str) and bool(value.strip()), where, "a word", value)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any, where: str) -> None:
    """Fits a finite number."""
    _require(is_number(value), where, "a number", value)


def positive(value: Any, where: str) -> None:
    """Fits a finite number above 0."""
    _require(is_number(value) and value > 0, where, "a number above 0", value)


def whole(least: int) -> Check:
    """Fits integers from ``least`` on."""

    def check(value: Any, where: str) -> None:
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        _require(fits, where, f"a whole number of at least {least}", value)

    return check


def nullable(inner: Check) -> Check:
    """Fits null and what ``inner`` fits."""
    return lambda value, where: None if value is None else inner(value, where)


def list_of(inner: Check, *, least: int = 0, most: int | None = None) -> Check:
    """Fits a list of at least ``least`` values, and at most ``most``, that each fit ``inner``."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, list), where, "a list", value)
        fits = len(value) >= least and (most is None or len(value) <= most)
        _require(fits, where, f"a list of at least {least}" + ("" if most is None else f", at most {most}"), value)
        for index, item in enumerate(value):
            inner(item, f"{where}[{index}]")

    return check


def map_of(inner: Check, *, least: int = 0) -> Check:
    """Fits a mapping of at least ``least`` names to values that each fit ``inner``."""

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, dict) and len(value) >= least, where, "a mapping", value)
        for name, item in value.items():
            text(name, f"a key of {where}")
            inner(item, f"{where}.{name}")

    return check


def record(
    required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, closed: bool = False
) -> Check:
    """Fits a mapping with these keys; ``closed``: and with no others."""
    known = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        _require(isinstance(value, dict), where, "a mapping", value)
        for name in required:
            if name not in value:
                raise ValueError(f"{where} lacks {name!r}")
        for name, item in value.items():
            if name in known:
                known[name](item, f"{where}.{name}")
            elif closed:
                raise ValueError(f"{where} has the unknown key {name!r}")

    return check


def _require(fits: bool, where: str, wanted: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{where} is {reprlib.repr(value)}, not {wanted}")
