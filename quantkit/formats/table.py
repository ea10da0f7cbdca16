"""The FORMATS table and what can be said of any format: JSON form, size, dequantized weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from math import prod
from typing import Any, get_type_hints

from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats import bcq, bipolar, flatten, trellis
from quantkit.formats.base import ADDED_LATER, Format, PackedWeight, Shape

FORMATS: dict[str, Format] = {
    "bcq": bcq.FORMAT,
    "bipolar": bipolar.FORMAT,
    "flatten": flatten.FORMAT,
    "trellis": trellis.FORMAT,
}


def format_name(spec: Any) -> str:
    """Name of the row of FORMATS that a spec belongs to."""
    return next(name for name, row in FORMATS.items() if row.spec is type(spec))


def spec_to_json(spec: Any) -> dict[str, Any]:
    """The spec as it stands in config.json: {"format": name, field: value, ...}; ADDED_LATER says what is left out."""
    left_out = {f.name for f in fields(spec) if f.metadata == ADDED_LATER and getattr(spec, f.name) == f.default}
    return {"format": format_name(spec), **{k: v for k, v in asdict(spec).items() if k not in left_out}}


def spec_from_json(entry: Mapping[str, Any]) -> Any:
    """Inverse of spec_to_json.

    Raises CheckpointError for an unknown format, a field this version does not know, or an impossible value.
    """
    values = dict(entry)
    name = values.pop("format", None)
    if not isinstance(name, str) or name not in FORMATS:
        raise CheckpointError(f"unknown format {name!r} in quantization_config; known: {', '.join(sorted(FORMATS))}")
    cls = FORMATS[name].spec
    unknown = sorted(set(values) - {f.name for f in fields(cls)})
    if unknown:
        raise CheckpointError(f"format {name}: unknown field {unknown[0]!r}; written by a newer quantkit?")
    types = get_type_hints(cls)
    for field, value in values.items():
        if type(value) is not types[field]:  # True is no 1, and 4.0 no 4
            raise CheckpointError(f"format {name}: {field} is {value!r}, not {types[field].__name__}")
    try:
        return cls(**values)
    except (RecipeError, TypeError) as error:
        raise CheckpointError(f"format {name}: {error}") from error


def stored_bytes(spec: Any, shape: Shape) -> int:
    """Bytes that the stored tensors of one [N, K] weight take; the bias is not counted."""
    tensors = FORMATS[format_name(spec)].tensors(spec, shape)
    return sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())


def dequantize(packed: PackedWeight) -> Tensor:
    """The weight that the stored tensors stand for, [N, K] fp32."""
    return FORMATS[format_name(packed.spec)].dequantize(packed.spec, packed.tensors, packed.shape)
