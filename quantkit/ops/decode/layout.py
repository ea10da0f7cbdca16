"""What the decoding kernels ask of tensors: type, contiguity, whole 16-byte vectors, widths of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.cuda.launch import DTYPE_CODES

DTYPES = (torch.float16, torch.bfloat16)
DTYPE_CODES_TAKEN = tuple(DTYPE_CODES[dtype] for dtype in DTYPES)
HEAD_DIMS = (64, 128, 256)
VECTOR_VALUES = 8
"""16-bit elements of a 16-byte vector."""

MOST_NORM_VALUES = 16384
"""K of the longest norm."""

_VECTOR_BYTES = 16


def can_norm(x: Tensor) -> bool:
    """Whether norms take x [..., K]."""
    in_features = x.shape[-1]
    whole = in_features % VECTOR_VALUES == 0 and in_features <= MOST_NORM_VALUES
    return x.is_cuda and x.dtype in DTYPES and whole


def can_attend(q: Tensor, keys: Tensor) -> bool:
    """Whether attention takes q [B, H, M, D] on caches [B, Hkv, capacity, D]: a single token."""
    single = q.shape[0] == 1 and q.shape[2] == 1
    known = q.dtype == keys.dtype and q.dtype in DTYPES and q.shape[3] in HEAD_DIMS
    return q.is_cuda and single and known and keys.is_contiguous()


def can_rotate(q: Tensor, rotary: tuple[Tensor, Tensor]) -> bool:
    """Whether attention applies the rotary embedding of this cosine and sine to q [..., D]."""
    return all(part.dtype == q.dtype and part.numel() == q.shape[-1] and part.is_contiguous() for part in rotary)


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Whether the gated activation takes these: of one shape and type, contiguous, made of whole vectors."""
    whole = gate.numel() % VECTOR_VALUES == 0 and all(t.data_ptr() % _VECTOR_BYTES == 0 for t in (gate, up))
    same = gate.shape == up.shape and gate.dtype == up.dtype and gate.is_contiguous() and up.is_contiguous()
    return gate.is_cuda and gate.dtype in DTYPES and same and whole
