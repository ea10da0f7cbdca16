"""The op ``quantkit::int8_attention``: softmax(Q K^T) V with both products on INT8 codes (FlattenQuant, section 5.1).

  Q, K, V   codes = clamp(round(x / step), -127, 127), one static step each; NaN gives 0
  scores    s = (Qc Kc) * step_q step_k scaling, plus the mask
  P         codes round(127 exp(s - largest s of the row)), and a row is divided by the sum of its codes
A row that sees no key gives 0, a row of Q with a NaN gives NaN.

All sums are those of integers, on CPU and GPU alike. What may differ between them is the last bit of exp, and with it
by one a code of P that lies between two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.cuda.launch import DTYPE_CODES
from quantkit.errors import KernelError
from quantkit.ops.attention.instances import MOST_CODE
from quantkit.ops.attention.launch import Problem, mma_launch, quantize_launch, wgmma_launch
from quantkit.ops.attention.layout import aligned, code_tiles, whole_runs
from quantkit.ops.attention.plan import MOST_KEYS, attention_form, padded_head_dim
from quantkit.ops.registry import define_op

_EXACT_TERMS = 1024  # products of two codes whose sum stays below 2^24, fp32's integers


class Int8Attention(NamedTuple):
    """query [B, H, M, D]; key [B, Hkv, T, D]; value [B, Hkv, T, Dv], Hkv a divisor of H -> [B, M, H, Dv].

    mask: broadcastable to [B, H, M, T]; bool, true where a row sees a key, or added to the scores. steps: of the codes
    of Q, K and V. causal: row m sees keys up to m + T - M.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    steps: Sequence[float]
    scaling: float
    causal: bool


def int8_attention_reference(op: Int8Attention) -> Tensor:
    """Integers held in fp32 and summed exactly, piece by piece where a sum could pass 2^24."""
    repeats = op.query.shape[1] // op.key.shape[1]
    query_codes = _codes(op.query, op.steps[0])
    key_codes = _codes(op.key, op.steps[1]).repeat_interleave(repeats, dim=1)
    value_codes = _codes(op.value, op.steps[2]).repeat_interleave(repeats, dim=1)
    scores = _integer_product(query_codes, key_codes.transpose(-1, -2)) * (op.steps[0] * op.steps[1] * op.scaling)
    if op.causal:
        tokens, keys = scores.shape[-2:]
        seen = torch.ones(tokens, keys, dtype=torch.bool, device=scores.device).tril_(keys - tokens)
        scores = scores.masked_fill_(~seen, -math.inf)
    if op.mask is not None:
        scores = scores.masked_fill_(~op.mask, -math.inf) if op.mask.dtype == torch.bool else scores + op.mask
    largest = scores.amax(dim=-1, keepdim=True)
    largest = largest.masked_fill_(largest == -math.inf, 0.0)
    weights = torch.exp(scores - largest).mul_(MOST_CODE).round_()
    output = _integer_product(weights, value_codes) * (op.steps[2] / weights.sum(dim=-1, keepdim=True).clamp_(min=1))
    output = output.masked_fill_(op.query.isnan().any(dim=-1, keepdim=True), math.nan)
    return output.to(op.query.dtype).transpose(1, 2).contiguous()


def _codes(x: Tensor, step: float) -> Tensor:
    """Integers in fp32."""
    return (x.float() / step).nan_to_num_(nan=0.0).round_().clamp_(-MOST_CODE, MOST_CODE)


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of integer codes in fp32, summed exactly."""
    if a.shape[-1] <= _EXACT_TERMS:
        return a @ b
    pieces = zip(a.split(_EXACT_TERMS, dim=-1), b.split(_EXACT_TERMS, dim=-2), strict=True)
    first, *rest = ((left @ right).double() for left, right in pieces)
    return sum(rest, first).float()


def int8_attention_cuda(op: Int8Attention) -> Tensor:
    """Two kernels: codes of K and V, then attention, of which there are two forms (plan.py).

    Raises KernelError for heads wider than 256, element types that differ or are none of fp16, bf16 and fp32, more keys
    than int32 sums hold, a negative scaling, and GPUs before compute capability 8.0.
    """
    head_dim = padded_head_dim(max(op.query.shape[-1], op.value.shape[-1]))
    _check(op)
    batch, heads, tokens, _ = op.query.shape
    width = op.value.shape[-1]
    out = op.query.new_empty(batch, tokens, heads, whole_runs(width))
    if not out.numel():
        return out
    gpu = gpu_of(op.query.device)
    form = attention_form(gpu.architecture, head_dim, op.mask is not None)
    query, key, value = map(aligned, (op.query, op.key, op.value))
    tiles = code_tiles(key, head_dim, form.tile_keys)
    quantize_launch(form, head_dim, key=key, value=value, tiles=tiles, steps=op.steps).run()
    score_step = float(np.float32(op.steps[0] * op.steps[1] * op.scaling))
    steps = op.steps[0], op.steps[2], score_step
    problem = Problem(query, tiles, out, steps, key.shape[1], key.shape[2], op.causal)
    if form.swizzled:
        wgmma_launch(form, head_dim, problem, gpu.processors).run()
    else:
        mma_launch(form, head_dim, problem, op.mask).run()
    return out if out.shape[-1] == width else out[..., :width].contiguous()


def _check(op: Int8Attention) -> None:
    """Raise KernelError for what the kernels do not take."""
    keys, mask = op.key.shape[2], op.mask
    if keys > MOST_KEYS:
        raise KernelError(f"int8_attention on a GPU takes up to {MOST_KEYS} keys, not {keys}")
    if op.query.dtype not in DTYPE_CODES or not op.query.dtype == op.key.dtype == op.value.dtype:
        names = ", ".join(str(x.dtype).removeprefix("torch.") for x in (op.query, op.key, op.value))
        raise KernelError(f"int8_attention reads Q, K and V of one type, fp16, bf16 or fp32, on a GPU, not {names}")
    if mask is not None and mask.dtype != torch.bool and mask.dtype not in DTYPE_CODES:
        raise KernelError(f"int8_attention takes a mask of bool, fp16, bf16 or fp32 on a GPU, not {mask.dtype}")
    if op.scaling < 0:
        raise KernelError(f"int8_attention takes no negative scaling on a GPU, and got {op.scaling}")


def _samples() -> Iterator[Int8Attention]:
    for width, dtype in ((64, torch.float16), (96, torch.bfloat16), (128, torch.float32), (200, torch.float16)):
        query = torch.randn(2, 70, 4, width).to(dtype).transpose(1, 2)
        key, value = (torch.randn(2, 90, 2, width).to(dtype).transpose(1, 2) for _ in range(2))
        seen = torch.rand(2, 1, 70, 90) < 0.7
        for mask, causal in ((None, False), (None, True), (seen, False), (torch.where(seen, 0.0, -math.inf), True)):
            yield Int8Attention(query, key, value, mask, [0.03, 0.03, 0.03], width**-0.5, causal)


int8_attention = define_op(
    "int8_attention",
    Int8Attention,
    reference=int8_attention_reference,
    cuda=int8_attention_cuda,
    fake=lambda op: op.query.new_empty(op.query.shape[0], op.query.shape[2], op.query.shape[1], op.value.shape[-1]),
    samples=_samples,
)
