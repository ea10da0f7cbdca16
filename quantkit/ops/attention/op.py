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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quantkit.cuda.device import compute_capability, processor_count
from quantkit.cuda.launch import DTYPE_CODES, launch
from quantkit.errors import KernelError
from quantkit.ops.attention.instances import (
    BOOL_MASK,
    HEAD_DIMS,
    MOST_KEYS,
    QUANTIZE_KEYS,
    QUANTIZE_THREADS,
    AttentionForm,
    attention_form,
)
from quantkit.ops.registry import LIBRARY

LIBRARY.define(
    "int8_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float[] steps, float scaling, bool causal)"
    " -> Tensor"
)

MOST = 127
_EXACT_TERMS = 1024  # products of two codes whose sum stays below 2^24, fp32's integers
_RUN = 8  # elements that the kernels read at a time
_RUN_ALIGNMENT = 16  # bytes
_MOST_STRIDE = 2**31 - 1
_LEAST_CAPABILITY = (8, 0)
_LEAST_EXPONENT_STEP = 1e-30  # leaves every code of P at 127, and -inf as it is, where 0 would make it NaN


def int8_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    steps: Sequence[float],
    scaling: float,
    causal: bool,
) -> Tensor:
    """query [B, H, M, D]; key [B, Hkv, T, D]; value [B, Hkv, T, Dv], Hkv a divisor of H -> [B, M, H, Dv].

    mask: broadcastable to [B, H, M, T]; bool, true where a row sees a key, or added to the scores. steps: of the codes
    of Q, K and V. causal: row m sees keys up to m + T - M.
    Integers are held in fp32 and summed exactly, piece by piece where a sum could pass 2^24.
    """
    repeats = query.shape[1] // key.shape[1]
    query_codes = _codes(query, steps[0])
    key_codes = _codes(key, steps[1]).repeat_interleave(repeats, dim=1)
    value_codes = _codes(value, steps[2]).repeat_interleave(repeats, dim=1)
    scores = _integer_product(query_codes, key_codes.transpose(-1, -2)) * (steps[0] * steps[1] * scaling)
    if causal:
        rows, keys = scores.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril_(keys - rows)
        scores = scores.masked_fill_(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    largest = scores.amax(dim=-1, keepdim=True)
    largest = largest.masked_fill_(largest == -math.inf, 0.0)
    weights = torch.exp(scores - largest).mul_(MOST).round_()
    output = _integer_product(weights, value_codes) * (steps[2] / weights.sum(dim=-1, keepdim=True).clamp_(min=1))
    output = output.masked_fill_(query.isnan().any(dim=-1, keepdim=True), math.nan)
    return output.to(query.dtype).transpose(1, 2).contiguous()


def _codes(x: Tensor, step: float) -> Tensor:
    """Integers in fp32."""
    return (x.float() / step).nan_to_num_(nan=0.0).round_().clamp_(-MOST, MOST)


def _integer_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of integer codes in fp32, summed exactly."""
    if a.shape[-1] <= _EXACT_TERMS:
        return a @ b
    pieces = zip(a.split(_EXACT_TERMS, dim=-1), b.split(_EXACT_TERMS, dim=-2), strict=True)
    first, *rest = ((left @ right).double() for left, right in pieces)
    return sum(rest, first).float()


def int8_attention_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    steps: Sequence[float],
    scaling: float,
    causal: bool,
) -> Tensor:
    """As int8_attention_reference, in two kernels, of which there are two forms (quantkit.ops.attention.instances).

    Raises KernelError for heads wider than 256, element types that differ or are none of fp16, bf16 and fp32, more keys
    than int32 sums hold, a negative scaling, and GPUs before compute capability 8.0.
    """
    head_dim = _check(query, key, value, mask)
    if scaling < 0:
        raise KernelError(f"int8_attention takes no negative scaling on a GPU, and got {scaling}")
    batch, heads, rows, _ = query.shape
    width = value.shape[-1]
    out = query.new_empty(batch, rows, heads, _whole_runs(width))
    if not out.numel():
        return out
    capability = compute_capability(query.device)
    if capability < _LEAST_CAPABILITY:
        raise KernelError("int8_attention needs a GPU of compute capability 8.0 or later")
    form = attention_form(capability, head_dim, mask is not None)
    query, key, value = map(_aligned, (query, key, value))
    tiles = _quantized(form, head_dim, key, value, steps)
    score_step = float(np.float32(steps[0] * steps[1] * scaling))
    problem = _Problem(query, tiles, out, (steps[0], steps[2], score_step), key.shape[1], key.shape[2], causal)
    if form.swizzled:
        _launch_warpgroups(form, head_dim, problem)
    else:
        _launch_warps(form, head_dim, problem, mask)
    return out if out.shape[-1] == width else out[..., :width].contiguous()


def _quantized(form: AttentionForm, head_dim: int, key: Tensor, value: Tensor, steps: Sequence[float]) -> Tensor:
    """Codes of K and V in the tiles of a form."""
    batch, kv_heads, keys, _ = key.shape
    count = -(-keys // form.tile_keys)
    tiles = torch.empty(batch, kv_heads, count, 2 * form.tile_keys * head_dim, dtype=torch.int8, device=key.device)
    launch(
        form.quantize_unit(head_dim),
        key.device,
        grid=(count * form.tile_keys // QUANTIZE_KEYS, kv_heads, batch),
        block=(QUANTIZE_THREADS,),
        args=(key, value, tiles, steps[1], steps[2], *_extent(key), *_extent(value), keys, DTYPE_CODES[key.dtype]),
    )
    return tiles


@dataclass(frozen=True)
class _Problem:
    """What both forms read and write; steps: of the codes of Q and V, and of a score."""

    query: Tensor
    tiles: Tensor
    out: Tensor
    steps: tuple[float, float, float]
    kv_heads: int
    keys: int
    causal: bool

    @property
    def exponent_step(self) -> float:
        """What one in Q K^T adds to the exponent of 2."""
        return max(self.steps[2] * math.log2(math.e), _LEAST_EXPONENT_STEP)


def _launch_warpgroups(form: AttentionForm, head_dim: int, it: _Problem) -> None:
    batch, heads, rows, _ = it.query.shape
    items = -(-rows // form.block_rows(head_dim)) * heads * batch
    launch(
        form.unit(head_dim),
        it.query.device,
        grid=(min(items, processor_count(it.query.device)),),
        block=(form.threads,),
        args=(
            *(it.query, it.tiles, it.out, *it.steps[:2], it.exponent_step),
            *(*_extent(it.query), rows, it.keys, heads, items, heads // it.kv_heads),
            *(it.out.shape[-1], int(it.causal), DTYPE_CODES[it.query.dtype]),
        ),
        shared_mem=form.shared_bytes(head_dim),
    )


def _launch_warps(form: AttentionForm, head_dim: int, it: _Problem, mask: Tensor | None) -> None:
    batch, heads, rows, _ = it.query.shape
    mask_arguments: tuple[int, ...] = (0, 0, 0, 0, 0)
    exponent_step = it.exponent_step
    if mask is not None:
        mask_dtype = BOOL_MASK if mask.dtype == torch.bool else DTYPE_CODES[mask.dtype]
        mask_arguments = (*mask.expand(batch, heads, rows, it.keys).stride(), mask_dtype)
        exponent_step = exponent_step if mask_dtype == BOOL_MASK else math.log2(math.e)
    launch(
        form.unit(head_dim),
        it.query.device,
        grid=(-(-rows // form.block_rows(head_dim)), heads, batch),
        block=(form.threads,),
        args=(
            *(it.query, it.tiles, mask, it.out, *it.steps, exponent_step),
            *(*_extent(it.query), *mask_arguments, rows, it.keys, heads // it.kv_heads),
            *(it.out.shape[-1], int(it.causal), DTYPE_CODES[it.query.dtype]),
        ),
        shared_mem=form.shared_bytes(head_dim),
    )


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> int:
    """The kernels' width for these heads. Raises KernelError for what they do not take."""
    width = max(query.shape[-1], value.shape[-1])
    if width > HEAD_DIMS[-1]:
        raise KernelError(f"int8_attention on a GPU takes heads of up to {HEAD_DIMS[-1]} values, not {width}")
    if key.shape[2] > MOST_KEYS:
        raise KernelError(f"int8_attention on a GPU takes up to {MOST_KEYS} keys, not {key.shape[2]}")
    if query.dtype not in DTYPE_CODES or not query.dtype == key.dtype == value.dtype:
        names = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise KernelError(f"int8_attention reads Q, K and V of one type, fp16, bf16 or fp32, on a GPU, not {names}")
    if mask is not None and mask.dtype != torch.bool and mask.dtype not in DTYPE_CODES:
        raise KernelError(f"int8_attention takes a mask of bool, fp16, bf16 or fp32 on a GPU, not {mask.dtype}")
    return next(known for known in HEAD_DIMS if known >= width)


def _whole_runs(width: int) -> int:
    return -(-width // _RUN) * _RUN


def _aligned(x: Tensor) -> Tensor:
    """x [B, H, M, D] as the kernels read it, a copy with D filled up where it lies otherwise."""
    *outer, inner = x.stride()
    whole = x.shape[-1] % _RUN == 0 and x.data_ptr() % _RUN_ALIGNMENT == 0 and inner == 1
    if whole and all(s * x.itemsize % _RUN_ALIGNMENT == 0 and s <= _MOST_STRIDE for s in outer):
        return x
    filled = x.new_zeros(*x.shape[:-1], _whole_runs(x.shape[-1]))
    filled[..., : x.shape[-1]] = x
    return filled


def _extent(x: Tensor) -> tuple[int, int, int, int]:
    """Strides of batch, head and row, and the row's length."""
    batch, head, row, _ = x.stride()
    return batch, head, row, x.shape[-1]


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    steps: Sequence[float],
    scaling: float,
    causal: bool,
) -> Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1])


LIBRARY.impl("int8_attention", int8_attention_reference, "CPU")
LIBRARY.impl("int8_attention", int8_attention_cuda, "CUDA")
torch.library.register_fake("quantkit::int8_attention", _fake, lib=LIBRARY)

int8_attention = torch.ops.quantkit.int8_attention.default
