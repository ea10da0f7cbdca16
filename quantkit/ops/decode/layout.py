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

MOST_SEQUENCES = 65535
"""Blocks along z of a grid."""

MOST_NORM_VALUES = 16384
"""K of the longest norm."""

_VECTOR_BYTES = 16


def can_norm(x: Tensor) -> bool:
    """Whether norms take x [..., K]."""
    return x.is_cuda and norm_takes(x.dtype, x.shape[-1])


def norm_takes(dtype: torch.dtype, in_features: int) -> bool:
    """Whether norms take rows of so many elements."""
    return dtype in DTYPES and in_features % VECTOR_VALUES == 0 and in_features <= MOST_NORM_VALUES


def can_attend(q: Tensor, keys: Tensor) -> bool:
    """Whether attention takes q [B, H, M, D] on caches [B, Hkv, capacity, D]: a single token of each sequence."""
    single = q.shape[2] == 1 and q.shape[0] <= MOST_SEQUENCES
    known = q.dtype == keys.dtype and q.dtype in DTYPES and q.shape[3] in HEAD_DIMS
    return q.is_cuda and single and known and keys.is_contiguous()


def can_rotate(q: Tensor, rotary: tuple[Tensor, Tensor]) -> bool:
    """Whether attention applies the rotary embedding of this cosine and sine to q [..., D]."""
    return all(part.dtype == q.dtype and part.numel() == q.shape[-1] and part.is_contiguous() for part in rotary)


def can_place(heads: tuple[Tensor, Tensor, Tensor], keys: Tensor, rotary: tuple[Tensor, Tensor] | None) -> bool:
    """Whether place_prompt has a kernel for heads, the keys of its cache and rotary, as it takes them."""
    q, dtype = heads[0], keys.dtype
    if not (q.is_cuda and dtype in DTYPES and q.shape[3] % (2 * VECTOR_VALUES) == 0 and keys.is_contiguous()):
        return False
    ready = all(
        part.dtype == dtype and part.is_contiguous() and part.numel() % (q.shape[2] * q.shape[3]) == 0
        for part in rotary or ()
    )
    return ready and all(part.dtype == dtype and token_stride(part) is not None for part in heads)


def token_stride(x: Tensor) -> int | None:
    """Elements from a token of x [B, H, M, D] to the next, also from a sequence's last to the next one's first.

    None where heads of a token are not one behind the other in whole vectors, or tokens not evenly apart.
    """
    _, _, tokens, head_dim = x.shape
    together = x.stride(3) == 1 and (x.shape[1] == 1 or x.stride(1) == head_dim)
    stride = x.stride(2) if tokens > 1 else x.stride(0)
    even = x.shape[0] == 1 or x.stride(0) == tokens * stride
    whole = stride % VECTOR_VALUES == 0 and x.data_ptr() % _VECTOR_BYTES == 0
    return stride if together and even and whole else None


def rotary_takes(x: Tensor, cos_sin: Tensor, head_dim: int) -> bool:
    """Whether the rotary embedding cos_sin [P, R] of tokens x [M, H * head_dim] has a kernel; both are on a GPU."""
    width = cos_sin.shape[-1]
    whole = width % (2 * VECTOR_VALUES) == 0 and head_dim % VECTOR_VALUES == 0 and 0 < width <= head_dim
    ready = cos_sin.is_contiguous() and cos_sin.data_ptr() % _VECTOR_BYTES == 0
    return x.dtype in DTYPES and x.dtype == cos_sin.dtype and whole and ready


def has_vector_rows(x: Tensor) -> bool:
    """Whether rows of x [M, K] are contiguous, aligned vectors; they may be apart from each other."""
    return x.stride(1) == 1 and x.stride(0) % VECTOR_VALUES == 0 and x.data_ptr() % _VECTOR_BYTES == 0


def row_stride(x: Tensor) -> int | None:
    """Elements from one row [K] of x [..., K] to the next, rows being contiguous; None where they are not even."""
    width = x.shape[-1]
    if x.numel() == width:
        return width if x.stride(-1) == 1 or width == 1 else None
    sizes = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size != 1]
    even = all(sizes[i][1] == sizes[i + 1][0] * sizes[i + 1][1] for i in range(len(sizes) - 1))
    return sizes[-1][1] if even and x.stride(-1) == 1 else None


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Whether the gated activation takes these: of one shape and type, in even rows made of whole vectors."""
    same = gate.shape == up.shape and gate.dtype == up.dtype
    if not (gate.is_cuda and gate.dtype in DTYPES and same):
        return False
    strides = [row_stride(part) for part in (gate, up)]
    whole = all(t.data_ptr() % _VECTOR_BYTES == 0 for t in (gate, up)) and gate.shape[-1] % VECTOR_VALUES == 0
    return whole and all(stride is not None and stride % VECTOR_VALUES == 0 for stride in strides)


def gated_takes_halves(x: Tensor) -> bool:
    """The same for gate and up as the halves of the rows of x [..., 2 N], which is on a GPU."""
    whole = x.shape[-1] % (2 * VECTOR_VALUES) == 0 and x.data_ptr() % _VECTOR_BYTES == 0
    return x.dtype in DTYPES and x.is_contiguous() and whole
