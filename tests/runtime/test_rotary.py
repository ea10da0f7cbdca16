"""Angles of single tokens from a table: transformers' bits, and which embeddings are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quantkit.runtime.rotary import RotaryTable, rotary_table

CPU = torch.device("cpu")
POSITIONS = 70
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


def embedding(kind: str, **more: Any) -> LlamaRotaryEmbedding:
    rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope))


def table_of(module: LlamaRotaryEmbedding) -> RotaryTable:
    table = rotary_table(module)
    assert table is not None
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_single_tokens_get_the_angles_of_transformers(kind: str, dtype: torch.dtype) -> None:
    module = embedding(kind, **KINDS[kind])
    table, x = table_of(module), torch.zeros(2, 1, 64, dtype=dtype)
    table.reserve(POSITIONS, dtype, CPU)
    for positions in ([[0], [3]], [[64], [69]], [[41]]):
        places = torch.tensor(positions)
        for own, expected in zip(table(x, position_ids=places), module(x, position_ids=places), strict=True):
            assert own.shape == expected.shape
            assert own.is_contiguous() or len(positions) > 1
            assert torch.equal(own, expected)


def test_the_table_is_read_for_single_tokens_of_its_type_alone() -> None:
    module = embedding("default")
    asked: list[int] = []

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        asked.append(position_ids.shape[1])
        return module(x, position_ids)

    table, x = RotaryTable(forward), torch.zeros(1, 1, 64)
    table(x, torch.tensor([[3]]))
    table.reserve(POSITIONS, torch.float32, CPU)
    table.reserve(5, torch.float32, CPU)
    assert asked == [1, 128]
    table(x, torch.tensor([[3]]))
    table(x, torch.tensor([[3, 4]]))
    table(x.half(), torch.tensor([[3]]))
    assert asked == [1, 128, 2, 1]
    table.reserve(129, torch.float32, CPU)
    assert asked[4:] == [256]


def test_angles_that_depend_on_more_than_the_position_are_left_alone() -> None:
    assert rotary_table(embedding("dynamic", factor=2.0)) is None
    assert rotary_table(torch.nn.Linear(4, 4)) is None
