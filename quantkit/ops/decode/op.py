"""What runs between the products of one decoding step: norms, gated activations, attention and its cache.

GPU only, fp16 and bf16. Plain functions and no torch ops: they are for CUDA graphs, and attention writes its cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.ops.decode.launch import Splits, Token, attention_launch, combine_launch, gated_launch, norm_launch
from quantkit.ops.decode.plan import attention_block, head_blocks, split_count


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centered: bool) -> Tensor:
    """LayerNorm (centered) or RMSNorm of x [..., K] over its last dimension; weight and bias [K] in x's type."""
    return _norm(x, None, (weight, bias), epsilon, centered=centered)[1]


def add_norm(
    x: Tensor, addend: Tensor, parameters: tuple[Tensor, Tensor | None], epsilon: float, *, centered: bool
) -> tuple[Tensor, Tensor]:
    """x + addend, rounded, and ``norm`` of it; addend of x's shape and type, parameters: weight and bias."""
    return _norm(x, addend.contiguous(), parameters, epsilon, centered=centered)


def _norm(
    x: Tensor, addend: Tensor | None, parameters: tuple[Tensor, Tensor | None], epsilon: float, *, centered: bool
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, total = torch.empty_like(x), x if addend is None else torch.empty_like(x)
    launch = norm_launch(x, addend, parameters=parameters, epsilon=epsilon, centered=centered, total=total, y=y)
    launch.run()
    return total, y


def attention(
    q: Tensor, token: Token, cache: tuple[Tensor, Tensor], mask: Tensor, scale: float, query_scale: float = 1.0
) -> Tensor:
    """softmax(scale (query_scale q) keys^T) values of one token of B sequences, where the mask is true.

    mask: [B or 1, 1, 1, capacity]. q: [B, H, 1, D]; its product with query_scale is rounded, then the token's rotary
    embedding is applied. cache: keys and values [B, Hkv, capacity, D], where the token's are written; what lies behind
    it there does not count. Hkv a divisor of H.
    Only q and the token's key and value may come from the kernel queued last with overlap: the rest is read before that
    one ends.
    Returns [B, 1, H, D].
    """
    sequences, heads, _, head_dim = q.shape
    total, kv_heads, processors = sequences * heads, cache[0].shape[1], gpu_of(q.device).processors
    block = attention_block(sequences, kv_heads, heads // kv_heads, processors)
    blocks = sequences * head_blocks(kv_heads, heads // kv_heads, block)
    count = split_count(cache[0].shape[2], blocks, processors, block.heads)
    y = torch.empty(sequences, 1, heads, head_dim, dtype=q.dtype, device=q.device)
    splits = Splits(count)
    if count > 1:
        made = torch.empty(total * count * (head_dim + 2), dtype=torch.float32, device=q.device)
        splits = Splits(count, *made.split((total * count * head_dim, total * count * 2)))
    scales = scale, query_scale
    attention_launch(q, token, cache=cache, mask=mask, scales=scales, y=y, splits=splits, block=block).run()
    if count > 1:
        combine_launch(splits, y).run()
    return y


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate), rounded, times up; both of one shape, as can_gate takes them. activation: of ACTIVATIONS."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gated_launch(gate, up, y, activation).run()
    return y
