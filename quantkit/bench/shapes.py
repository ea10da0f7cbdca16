"""Shapes by name: the papers' matrices and the Linears of well-known models, without their weights."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from quantkit.errors import BenchError
from quantkit.recipe import nearest

_SQUARE = re.compile(r"(\d+)x(\d+)")
_POSITIONS = 4096


@dataclass(frozen=True)
class LinearShape:
    """One weight [N, K]; ``name`` says which layer it is."""

    name: str
    rows: int
    columns: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder by its sizes.

    family: bloom, llama or opt. head_dim times heads is the width of q. kv_heads: heads of k and v.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


def _opt(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape("opt", layers, hidden, 4 * hidden, heads, heads, 50272, tied=True)


MODELS: dict[str, ModelShape] = {
    "bloom-7b": ModelShape("bloom", 30, 4096, 4 * 4096, 32, 32, 250880, tied=True),
    "opt-6.7b": _opt(32, 4096, 32),
    "opt-13b": _opt(40, 5120, 40),
    "opt-30b": _opt(48, 7168, 56),
    "opt-66b": _opt(64, 9216, 72),
    "llama-2-7b": ModelShape("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama-2-70b": ModelShape("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama-3-8b": ModelShape("llama", 32, 4096, 14336, 32, 8, 128256),
    "smollm2-135m": ModelShape("llama", 30, 576, 1536, 9, 3, 49152, tied=True),
}


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
    hidden, ffn = model.hidden, model.ffn
    if model.family == "bloom":
        return (
            LinearShape("query_key_value", 3 * hidden, hidden),
            LinearShape("dense", hidden, hidden),
            LinearShape("dense_h_to_4h", ffn, hidden),
            LinearShape("dense_4h_to_h", hidden, ffn),
        )
    if model.family == "opt":
        return (
            LinearShape("q, k, v, out_proj", hidden, hidden),
            LinearShape("fc1", ffn, hidden),
            LinearShape("fc2", hidden, ffn),
        )
    keys = LinearShape("k_proj, v_proj", model.kv_heads * model.head_dim, hidden)
    return (
        LinearShape("q_proj, o_proj", hidden, hidden),
        *(() if model.kv_heads == model.heads else (keys,)),
        LinearShape("gate_proj, up_proj", ffn, hidden),
        LinearShape("down_proj", hidden, ffn),
    )


def parse_shapes(text: str) -> tuple[LinearShape, ...]:
    """``opt-6.7b,4096x11008`` -> shapes; a name stands for a paper's matrices or a model's Linears, NxK for itself.

    Raises BenchError for an unknown name, with the nearest known one.
    """
    found: list[LinearShape] = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        square = _SQUARE.fullmatch(name)
        if square:
            rows, columns = int(square[1]), int(square[2])
            if not rows or not columns:
                raise BenchError(f"--shapes {name}: rows and columns must be positive")
            found.append(LinearShape(name, rows, columns))
        elif name in PAPER_SHAPES:
            found += PAPER_SHAPES[name]
        elif name in MODELS:
            found += [LinearShape(f"{name} {s.name}", s.rows, s.columns) for s in model_linears(MODELS[name])]
        else:
            known = nearest(name, [*PAPER_SHAPES, *MODELS])
            raise BenchError(f"--shapes {name}: neither NxK nor a known name; {known}")
    if not found:
        raise BenchError("--shapes: give at least one shape, as NxK or by name")
    return tuple(found)


def model_shape(name: str) -> ModelShape:
    """The sizes of a model by name. Raises BenchError for an unknown one."""
    if name not in MODELS:
        raise BenchError(f"model shape {name!r}: unknown; {nearest(name, MODELS)}")
    return MODELS[name]


def shape_config(shape: ModelShape) -> Any:
    """transformers' config of a model of the shape with one layer."""
    from transformers import BloomConfig, LlamaConfig, OPTConfig

    if shape.family == "bloom":  # four times as wide between, no limit of positions
        return BloomConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            n_layer=1,
            n_head=shape.heads,
            tie_word_embeddings=shape.tied,
        )
    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": shape.tied,
    }
    if shape.family == "opt":
        return OPTConfig(ffn_dim=shape.ffn, word_embed_proj_dim=shape.hidden, **common)
    return LlamaConfig(intermediate_size=shape.ffn, num_key_value_heads=shape.kv_heads, **common)
