"""INT8 attention for benchmarks: scales from random windows, operands as models hand them over, and a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import BenchError
from quantkit.ops.attention.instances import MOST_CODE
from quantkit.ops.attention.op import Int8Attention, int8_attention, int8_attention_reference

_FIRST_ID, _WINDOW = 10, 256
_CHECKED_KEYS = 200
_MOST_QUERIES_APART = 0.05  # with a code of P off by one, where the last bit of exp differs from torch's
_STEPS_APART = 2  # of V: what such a code moves a result by at most


@dataclass(frozen=True)
class HeadShape:
    """Heads of Q, heads of K and V, and values per head."""

    heads: int
    kv_heads: int
    head_dim: int


def install_int8_attention(model: Any) -> None:
    """Make a model compute attention in INT8, with scales from one window of random tokens."""
    from quantkit.runtime import int8_attention as integration

    windows = torch.randint(_FIRST_ID, model.config.vocab_size, (1, _WINDOW))
    integration.install(model, integration.calibrate(model, windows))


def head_shape(model: Any) -> HeadShape:
    """The shape of a model's attention."""
    config = model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return HeadShape(heads, getattr(config, "num_key_value_heads", None) or heads, head_dim)


def random_heads(shape: HeadShape, batch: int, length: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V [batch, heads, length, head_dim] as views of what Linears give, of the device and type of ``like``."""
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    query, key, value = (
        torch.randn(batch, length, count, shape.head_dim, dtype=like.dtype, device=like.device).transpose(1, 2)
        for count in counts
    )
    return query, key, value


def code_steps(*operands: Tensor) -> list[float]:
    """Steps whose codes reach the largest magnitude of each operand."""
    return [x.abs().amax().float().item() / MOST_CODE for x in operands]


def check_int8_attention(what: str, shape: HeadShape, like: Tensor) -> None:
    """Compare the op on the device of ``like`` with the reference: one causal sequence of a group of heads.

    Raises BenchError where a result is further off than a code of P off by one explains, or too many are.
    """
    group = HeadShape(shape.heads // shape.kv_heads, 1, shape.head_dim)
    operands = random_heads(group, 1, _CHECKED_KEYS, like)
    steps, scaling = code_steps(*operands), shape.head_dim**-0.5
    got = int8_attention(*operands, None, steps, scaling, True).cpu()
    query, key, value = (x.cpu() for x in operands)
    expected = int8_attention_reference(Int8Attention(query, key, value, None, steps, scaling, True))
    apart = (got.double() - expected.double()).abs()
    most, share = apart.max().item(), (apart.amax(dim=-1) > 0).double().mean().item()
    if not most <= _STEPS_APART * steps[2] or share > _MOST_QUERIES_APART:
        raise BenchError(
            f"{what}: INT8 attention differs in {share:.1%} of the results, by up to {most:.2g}; not timed"
        )
