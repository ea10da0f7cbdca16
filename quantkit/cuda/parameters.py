"""A kernel's parameters as its CUDA source declares them, and the check of a launch's arguments against them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.cuda.source import KernelSource
from quantkit.cuda.tensor_map import MAP_BYTES, TensorMap
from quantkit.errors import KernelError


class Within(NamedTuple):
    """A place in memory that one call takes for several things: a pointer of any type. offset: in bytes."""

    memory: Tensor
    offset: int

    @property
    def device(self) -> torch.device:
        """Of the memory."""
        return self.memory.device

    def data_ptr(self) -> int:
        """Its address."""
        return self.memory.data_ptr() + self.offset


Pointer = Tensor | Within
Argument = Pointer | TensorMap | int | float | None
"""Tensor, Within or None: a pointer (null for None). TensorMap or None: a map (zeros for None). int (bool too): a
32-bit integer. float: fp32."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_WORD = re.compile(r"\s*(\w+)\s*")
_PARAMETER = re.compile(r"(?P<type>.*[\s*&>])(?P<name>\w+)$", re.DOTALL)
_QUALIFIERS = re.compile(r"\b(const|__restrict__|__grid_constant__|typename)\b")
_MAP = "TensorMap"
_SCALARS = {"int": "i", "uint32": "I", "float": "f", _MAP: f"{MAP_BYTES}s"}
_POINTER_CODE = "P"
# Pointers to these types take tensors of these only; any other pointer is to bytes or vectors of anything.
_ELEMENTS = {
    "float": (torch.float32,),
    "int": (torch.int32,),
    "long long": (torch.int64,),
    "uint16": (torch.float16, torch.bfloat16),
}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a __global__ function. type: without const and *, of what a pointer points to."""

    name: str
    type: str
    pointer: bool

    @property
    def map(self) -> bool:
        """Whether it is a tensor map, by value."""
        return self.type == _MAP and not self.pointer

    @property
    def code(self) -> str:
        """Its type as the module struct names it."""
        return _POINTER_CODE if self.pointer else _SCALARS[self.type]


@cache
def kernel_parameters(source: KernelSource, function: str) -> tuple[Parameter, ...]:
    """The parameters of a __global__ function, in order.

    Raises KernelError where the source has no such function, or one with a parameter of a type that no launch passes.
    """
    found = global_functions(source.text)
    if function not in found:
        raise KernelError(f"{source.file}: no __global__ function {function}")
    for parameter in found[function]:
        if not parameter.pointer and parameter.type not in _SCALARS:
            raise KernelError(
                f"{source.file}: {function} takes {parameter.name} as {parameter.type}, which no launch passes"
            )
    return found[function]


def global_functions(text: str) -> dict[str, tuple[Parameter, ...]]:
    """Every __global__ function or template of a CUDA source, with its parameters in order.

    Raises KernelError for a declaration that cannot be read.
    """
    plain = _COMMENT.sub(" ", text)
    return dict(_declaration(plain, start.end()) for start in re.finditer(r"\b__global__\b", plain))


def _declaration(text: str, at: int) -> tuple[str, tuple[Parameter, ...]]:
    """Name and parameters of the function whose declaration goes on at ``at``; attributes take parentheses too."""
    while word := _WORD.match(text, at):
        at = word.end()
        if text[at : at + 1] != "(":
            continue
        inside = _parenthesized(text, at)
        if not word[1].startswith("__"):
            return word[1], tuple(map(_parameter, _separated(inside)))
        at += len(inside) + 2
    raise KernelError(f"a __global__ function cannot be read at {text[at : at + 40]!r}")


def _parenthesized(text: str, start: int) -> str:
    """What stands between the parenthesis at ``start`` and the one that closes it."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    raise KernelError(f"a __global__ function cannot be read at {text[start : start + 40]!r}")


def _separated(text: str) -> Iterator[str]:
    """The parts between commas that stand in no brackets."""
    depth, part = 0, ""
    for character in text:
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield part
            part = ""
        else:
            part += character
    if part.strip():
        yield part


def _parameter(text: str) -> Parameter:
    found = _PARAMETER.match(text.strip())
    if found is None:
        raise KernelError(f"a kernel's parameter cannot be read: {text.strip()!r}")
    kind = _QUALIFIERS.sub(" ", found["type"])
    return Parameter(found["name"], " ".join(kind.replace("*", " ").split()), "*" in kind)


def check_arguments(
    kernel: str, parameters: tuple[Parameter, ...], arguments: Mapping[str, Argument], device: torch.device
) -> None:
    """Raise KernelError unless every parameter has an argument that it can take, and nothing else is given.

    kernel: its name, for the message. device: where tensors must be.
    """
    names = {parameter.name for parameter in parameters}
    if missing := names - arguments.keys():
        raise KernelError(f"kernel {kernel}: no argument for {', '.join(sorted(missing))}")
    if unknown := arguments.keys() - names:
        raise KernelError(f"kernel {kernel}: no parameter {', '.join(sorted(unknown))}")
    for parameter in parameters:
        value = arguments[parameter.name]
        if not _takes(parameter, value):
            kind = f"{parameter.type}*" if parameter.pointer else parameter.type
            given = f"a {value.dtype} tensor" if isinstance(value, Tensor) else repr(value)
            raise KernelError(f"kernel {kernel}: {parameter.name} is {kind}, and got {given}")
        if isinstance(value, Tensor | Within | TensorMap) and value.device != device:
            raise KernelError(
                f"kernel {kernel}: {parameter.name} is on {value.device}, and the kernel runs on {device}"
            )


def _takes(parameter: Parameter, value: Argument) -> bool:
    if parameter.pointer:
        known = _ELEMENTS.get(parameter.type)
        if isinstance(value, Tensor):
            return known is None or value.dtype in known
        return value is None or isinstance(value, Within)
    if parameter.map:
        return value is None or isinstance(value, TensorMap)
    if parameter.type == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    low, high = (0, 2**32) if parameter.type == "uint32" else (-(2**31), 2**31)
    return isinstance(value, int) and low <= value < high
