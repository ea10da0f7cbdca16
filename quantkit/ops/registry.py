"""Defining torch ops: the one place with torch.library. OPS lists them all.

An op's arguments are the fields of a NamedTuple, which is thereby the only place that writes its schema: the op's
reference, its CUDA implementation, its fake and its samples each take or give one such tuple.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("quantkit", "DEF")
_Arguments = TypeVar("_Arguments", bound=NamedTuple)


@dataclass(frozen=True)
class Op:
    """One row of OPS.

    arguments: a NamedTuple class. reference: the op's definition, in PyTorch. cuda: the same through kernels.
    samples: small arguments of every kind that the kernels tell apart, on the CPU.
    """

    name: str
    arguments: type[Any]
    reference: Callable[[Any], Tensor]
    cuda: Callable[[Any], Tensor]
    samples: Callable[[], Iterator[Any]]

    @property
    def overload(self) -> Callable[..., Tensor]:
        """The op as torch calls it, with the arguments in the order of the fields."""
        overload: Callable[..., Tensor] = getattr(torch.ops.quantkit, self.name).default
        return overload


OPS: dict[str, Op] = {}
"""Every op by its name."""


def define_op(
    name: str,
    arguments: type[_Arguments],
    *,
    reference: Callable[[_Arguments], Tensor],
    cuda: Callable[[_Arguments], Tensor],
    fake: Callable[[_Arguments], Tensor],
    samples: Callable[[], Iterator[_Arguments]],
) -> Callable[..., Tensor]:
    """Define ``quantkit::name``; returns the op. arguments, reference, cuda, samples: see Op. fake: for tracing."""
    fields: Any = arguments
    _LIBRARY.define(name + _schema(fields))
    _LIBRARY.impl(name, lambda *given, **named: reference(fields(*given, **named)), "CPU")
    _LIBRARY.impl(name, lambda *given, **named: cuda(fields(*given, **named)), "CUDA")
    torch.library.register_fake(
        f"quantkit::{name}", lambda *given, **named: fake(fields(*given, **named)), lib=_LIBRARY
    )
    OPS[name] = Op(name, fields, reference, cuda, samples)
    return OPS[name].overload


def _schema(arguments: Any) -> str:
    """The fields of a NamedTuple class, with their types and defaults, as torch.library writes them."""
    types = get_type_hints(arguments)
    parameters = [
        inspect.Parameter(
            field,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=types[field],
            default=arguments._field_defaults.get(field, inspect.Parameter.empty),
        )
        for field in arguments._fields
    ]

    def prototype() -> None:
        """Stands for a function of these parameters."""

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=Tensor)  # type: ignore[attr-defined]
    return torch.library.infer_schema(prototype, mutates_args=())
