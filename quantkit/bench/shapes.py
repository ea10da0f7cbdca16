"""Shapes by name: the papers' matrices and the Linears of well-known models, without their weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import BenchError
from quantkit.models.families import family_named
from quantkit.models.family import ModelShape, Sizes
from quantkit.recipe import nearest

_SQUARE = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True)
class LinearShape:
    """One weight [N, K]; ``name`` says which layer it is."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class ExpertsShape:
    """The weights [experts, N, K] of one place in a block, of which every token takes top_k.

    shared_input: whether the products of a token have one input.
    """

    name: str
    experts: int
    top_k: int
    out_features: int
    in_features: int
    shared_input: bool


def _opt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape("opt", layers, hidden, 4 * hidden, heads, heads, 50272, tied=True)


MODELS: dict[str, ModelShape] = {
    "bloom-7b": ModelShape("bloom", 30, 4096, 4 * 4096, 32, 32, 250880, tied=True),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "opt-175b": _opt(96, 12288, 96),
    "llama-2-7b": ModelShape("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-70b": ModelShape("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": ModelShape("llama", 32, 4096, 14336, 32, 8, 128256),
    "llama-3-70b": ModelShape("llama", 80, 8192, 28672, 64, 8, 128256),
    "smollm2-135m": ModelShape("llama", 30, 576, 1536, 9, 3, 49152, tied=True),
}


def _experts(name: str, experts: int, top_k: int, hidden: int, intermediate: int) -> tuple[ExpertsShape, ...]:
    return (
        ExpertsShape(f"{name} gate and up", experts, top_k, 2 * intermediate, hidden, shared_input=True),
        ExpertsShape(f"{name} down", experts, top_k, hidden, intermediate, shared_input=False),
    )


EXPERTS: dict[str, tuple[ExpertsShape, ...]] = {
    "qwen3-30b-a3b": _experts("qwen3-30b-a3b", 128, 8, 2048, 768),
    "mixtral-8x7b": _experts("mixtral-8x7b", 8, 2, 4096, 14336),
}


def experts_shapes(names: str) -> tuple[ExpertsShape, ...]:
    """The products of experts in a block of each model, by names separated by commas.

    Raises BenchError for an unknown name.
    """
    found: list[ExpertsShape] = []
    for name in (part.strip() for part in names.split(",")):
        if name not in EXPERTS:
            raise BenchError(f"`shapes` {name}: no model of experts is known by this name; {nearest(name, EXPERTS)}")
        found += EXPERTS[name]
    return tuple(found)


def _squares(*sizes: int) -> tuple[LinearShape, ...]:
    return tuple(LinearShape(f"{size}x{size}", size, size) for size in sizes)


_GPT3 = 12288
PAPER_SHAPES: dict[str, tuple[LinearShape, ...]] = {
    "nuqmm-table2": _squares(4096, 7168, 12288),
    "nuqmm-table3": _squares(8192, 12288, 16384),
    "gpt3-175b": (  # nuQmm Table 4
        LinearShape("attention qkv", 3 * _GPT3, _GPT3),
        LinearShape("attention output", _GPT3, _GPT3),
        LinearShape("ffn 1", 4 * _GPT3, _GPT3),
        LinearShape("ffn 2", _GPT3, 4 * _GPT3),
    ),
    "squares": _squares(4096, 8192, 12288, 16384),
}


def model_linears(model: ModelShape) -> tuple[LinearShape, ...]:
    """The different Linears of one decoder block."""
    found: dict[tuple[int, int], LinearShape] = {}
    for name, *sizes in _sizes(model).linears:
        out_features, in_features = (getattr(model, size) for size in sizes)
        found.setdefault((out_features, in_features), LinearShape(name, out_features, in_features))
    return tuple(found.values())


def parse_shapes(text: str) -> tuple[LinearShape, ...]:
    """``opt-6.7b,4096x11008`` -> shapes; a name stands for a paper's matrices or a model's Linears, NxK for itself.

    Raises BenchError for an unknown name, with the nearest known one.
    """
    found: list[LinearShape] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        square = _SQUARE.fullmatch(name)
        if square:
            out_features, in_features = int(square[1]), int(square[2])
            if not out_features or not in_features:
                raise BenchError(f"`shapes` {name}: N and K must be positive")
            found.append(LinearShape(name, out_features, in_features))
        elif name in PAPER_SHAPES:
            found += PAPER_SHAPES[name]
        elif name in MODELS:
            found += [replace(shape, name=f"{name} {shape.name}") for shape in model_linears(MODELS[name])]
        else:
            known = nearest(name, [*PAPER_SHAPES, *MODELS])
            raise BenchError(f"`shapes` {name}: neither NxK nor a known name; {known}")
    if not found:
        raise BenchError("`shapes`: give at least one shape, as NxK or by name")
    return tuple(found)


def model_shape(name: str) -> ModelShape:
    """The sizes of a model by name. Raises BenchError for an unknown one."""
    if name not in MODELS:
        raise BenchError(f"model shape {name!r}: unknown; {nearest(name, MODELS)}")
    return MODELS[name]


def shape_config(shape: ModelShape) -> Any:
    """transformers' config of a model of the shape with one layer."""
    import transformers

    sizes, single = _sizes(shape), replace(shape, layers=1)
    config = {keyword: getattr(single, size) for keyword, size in sizes.config.items()}
    return getattr(transformers, sizes.config_class)(**config)


def _sizes(shape: ModelShape) -> Sizes:
    sizes = family_named(shape.family).sizes
    assert sizes is not None
    return sizes
