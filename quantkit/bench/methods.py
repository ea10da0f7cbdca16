"""What a method may be called in a benchmark: a storage format with its settings, filled with random content."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import BenchError, RecipeError
from quantkit.formats.base import Shape, TensorSpec
from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.bipolar import BipolarSpec, largest_value
from quantkit.formats.table import FORMATS, format_name
from quantkit.formats.trellis import TrellisSpec
from quantkit.methods import head_spec
from quantkit.quantizers.trellis.filters import filter_for
from quantkit.quantizers.trellis.quantizer import TrellisSettings

ROW = "row"
_HEAD = re.compile(r"(.+)-head(\d)")
_ROUNDED = "rtn-"
_LARGEST_SCALE, _LARGEST_CODE, _FP16_BITS = 0.02, 255, 16
_SCALES = (0.0, _LARGEST_SCALE)
_FLOAT_RANGES = {  # tensor name -> of its random content, where it is no scale
    "offset": (-_LARGEST_SCALE / 2, _LARGEST_SCALE / 2),
    "scale_factors": (0.0, _LARGEST_SCALE / _LARGEST_CODE),
}


@dataclass(frozen=True)
class MethodName:
    """One form of a method's name.

    pattern: of the whole name. example: shown in errors. spec: match -> format spec.
    """

    pattern: re.Pattern[str]
    example: str
    spec: Callable[[re.Match[str]], Any]


def _group(text: str) -> int:
    return ROW_WISE if text == ROW else int(text)


METHOD_NAMES: tuple[MethodName, ...] = (
    MethodName(
        re.compile(r"(?:bcq|rtn)-w(\d)-g(\d+|row)(-s8)?"),
        "bcq-w4-g128",
        lambda found: BcqSpec(int(found[1]), _group(found[2]), offset=True, scale_bits=8 if found[3] else 16),
    ),
    MethodName(
        re.compile(r"nuqmm-q(\d)-g(\d+|row)"),
        "nuqmm-q4-g128",
        lambda found: BcqSpec(int(found[1]), _group(found[2]), offset=False),
    ),
    MethodName(
        re.compile(r"bipolar-w(\d)a(\d+)(?:-g(\d+)(-s8)?)?"),
        "bipolar-w2a2",
        lambda found: BipolarSpec(
            int(found[1]), int(found[2]), _group(found[3] or "row"), scale_bits=8 if found[4] else 16
        ),
    ),
    MethodName(
        re.compile(r"trellis-w(\d)"),
        "trellis-w2",
        lambda found: TrellisSpec(*TrellisSettings(int(found[1])).shape),
    ),
)


def method_names(methods: str, bits: str | None = None) -> list[str]:
    """Names separated by commas; with ``bits`` each one with each of these: bipolar and w1a1,w2a2 are two names."""
    names = methods.split(",")
    return names if bits is None else [f"{name}-{width}" for name in names for width in bits.split(",")]


def method_spec(name: str) -> Any:
    """The format spec that a method name stands for.

    Raises BenchError for a name of no known form or with impossible settings.
    """
    for form in METHOD_NAMES:
        found = form.pattern.fullmatch(name)
        if found:
            try:
                return form.spec(found)
            except RecipeError as error:
                raise BenchError(f"method {name}: {error}") from error
    raise BenchError(f"method {name}: unknown; known forms: {', '.join(form.example for form in METHOD_NAMES)}")


def with_head(name: str) -> tuple[str, Any]:
    """``bcq-w4-g128-head6`` -> the method of the blocks, and the spec of a quantized head; None without one.

    Raises BenchError for impossible bits.
    """
    found = _HEAD.fullmatch(name)
    if found is None:
        return name, None
    try:
        return found[1], head_spec(int(found[2]))
    except RecipeError as error:
        raise BenchError(f"method {name}: {error}") from error


def has_equal_steps(name: str) -> bool:
    """Whether a method's levels are in equal steps: those of rounding to the nearest are."""
    return name.startswith(_ROUNDED)


def random_tensors(spec: Any, shape: Shape, device: torch.device, *, equal_steps: bool = False) -> dict[str, Tensor]:
    """Stored tensors of the spec's format with random content: any bits, scales in (0, 0.02], offsets within 0.01.

    Weights have no mean then, so that whole models of them stay within fp16. Scales of bipolar weights count in the
    largest value. equal_steps: fp16 scales of a plane are twice those of the plane before.
    """
    wanted = FORMATS[format_name(spec)].tensors(spec, shape)
    tensors = {name: _random(tensor, device, *_FLOAT_RANGES.get(name, _SCALES)) for name, tensor in wanted.items()}
    if isinstance(spec, BipolarSpec) and not spec.coded:
        tensors["scales"] /= largest_value(spec.weight_bits)
    if isinstance(spec, TrellisSpec):  # one filter, as those of a model have
        tensors["filter"] = filter_for(spec.weight_bits, spec.taps).to(device)
    elif equal_steps and spec.scale_bits == _FP16_BITS:
        powers = 2.0 ** torch.arange(spec.weight_bits, device=device).view(-1, 1, 1)
        steps = (tensors["scales"][:1].float() / powers.sum()).to(torch.float16)
        tensors["scales"] = steps * powers.to(torch.float16)
    return tensors


def _random(tensor: TensorSpec, device: torch.device, least: float, most: float) -> Tensor:
    if tensor.dtype.is_floating_point:
        return (most - (most - least) * torch.rand(tensor.shape, device=device)).to(tensor.dtype)
    limits = torch.iinfo(tensor.dtype)
    most = limits.max if tensor.largest is None else tensor.largest
    return torch.randint(limits.min, most + 1, tensor.shape, dtype=tensor.dtype, device=device)
