"""Single-token kernels for decoding under CUDA graphs: norms, attention with its cache. GPU only, fp16 and bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.cuda.decode_units import (
    ATTENTION_CAPACITY,
    ATTENTION_THREADS,
    HEAD_DIMS,
    NORM_COLUMNS,
    NORM_THREADS,
    attention_unit,
    norm_unit,
)
from quantkit.cuda.launch import DTYPE_CODES, launch

_TYPES = (torch.float16, torch.bfloat16)
_VECTOR_VALUES = 8
_FLOAT_BYTES = 4


def can_norm(x: Tensor) -> bool:
    """Whether ``norm`` takes x [..., K]."""
    columns = x.shape[-1]
    return x.is_cuda and x.dtype in _TYPES and columns % _VECTOR_VALUES == 0 and columns <= NORM_COLUMNS


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, *, centered: bool) -> Tensor:
    """LayerNorm (centered) or RMSNorm of x [..., K] over its last dimension; weight and bias [K] in x's type."""
    x = x.contiguous()
    y = torch.empty_like(x)
    launch(
        norm_unit(centered),
        x.device,
        grid=(x.numel() // x.shape[-1],),
        block=(NORM_THREADS,),
        args=(x, weight, bias, y, x.shape[-1], epsilon, DTYPE_CODES[x.dtype]),
        overlap=True,
    )
    return y


def can_attend(q: Tensor, keys: Tensor) -> bool:
    """Whether ``attention`` takes q [B, H, M, D] on caches [B, Hkv, capacity, D]."""
    single = q.shape[0] == 1 and q.shape[2] == 1
    small = q.shape[3] in HEAD_DIMS and keys.shape[2] <= ATTENTION_CAPACITY
    return q.is_cuda and q.dtype == keys.dtype and q.dtype in _TYPES and single and small and keys.is_contiguous()


def attention(
    q: Tensor, own: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor], mask: Tensor, position: Tensor, scale: float
) -> Tensor:
    """softmax(scale q keys^T) values of one token, where mask [1, 1, 1, capacity] is true.

    q: [1, H, 1, D]. own: the token's key and value [1, Hkv, 1, D], written at ``position`` [1] int64 of ``cache``, the
    keys and values [1, Hkv, capacity, D]; what lies behind it there does not count. Hkv a divisor of H.
    Returns [1, 1, H, D].
    """
    _, heads, _, width = q.shape
    keys, values = cache
    capacity = keys.shape[2]
    y = torch.empty(1, 1, heads, width, dtype=q.dtype, device=q.device)
    pointers = q.contiguous(), own[0].contiguous(), own[1].contiguous(), keys, values, mask, position, y
    launch(
        attention_unit(width),
        q.device,
        grid=(heads,),
        block=(ATTENTION_THREADS,),
        args=(*pointers, heads // keys.shape[1], capacity, scale, DTYPE_CODES[q.dtype]),
        shared_mem=capacity * _FLOAT_BYTES,
        overlap=True,
    )
    return y
