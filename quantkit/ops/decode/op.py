"""Single-token kernels for decoding under CUDA graphs: norms, gates, attention and its cache. GPU, fp16 and bf16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quantkit.cuda.device import processor_count
from quantkit.cuda.launch import DTYPE_CODES, launch
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.decode.instances import (
    ATTENTION_THREADS,
    GATED_THREADS,
    HEAD_DIMS,
    NORM_COLUMNS,
    NORM_THREADS,
    SLICE_ENTRIES,
    SLICE_STEP,
    attention_unit,
    gated_unit,
    merge_unit,
    norm_unit,
)

_TYPES = (torch.float16, torch.bfloat16)
_VECTOR_VALUES = 8
_FLOAT_BYTES, _VECTOR_BYTES = 4, 16
_ROUND, _MERGE, _MERGED_SLICE = 192, 256, 16  # entries that take as long as: a round of blocks, a merge, a slice of it
_MOST_SLICES = 64


def can_norm(x: Tensor) -> bool:
    """Whether ``norm`` takes x [..., K]."""
    columns = x.shape[-1]
    return x.is_cuda and x.dtype in _TYPES and columns % _VECTOR_VALUES == 0 and columns <= NORM_COLUMNS


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
    launch(
        norm_unit(centered, DTYPE_CODES[x.dtype], x.shape[-1]),
        x.device,
        grid=(x.numel() // x.shape[-1],),
        block=(NORM_THREADS,),
        args=(x, addend, *parameters, total, y, x.shape[-1], epsilon),
        overlap=True,
    )
    return total, y


@dataclass(frozen=True, eq=False)
class Token:
    """What one token brings to ``attention``: key and value [1, Hkv, 1, D], and position [1] int64, their place.

    turn: cosine and sine, D values each of the key's type, by which q and key are turned there, or None. Values i and
    i + D / 2 become x_i cos_i - x_(i + D/2) sin_i and x_(i + D/2) cos_(i + D/2) + x_i sin_(i + D/2), every product and
    sum rounded, as transformers does for Llama.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    turn: tuple[Tensor, Tensor] | None = None


def can_attend(q: Tensor, keys: Tensor) -> bool:
    """Whether ``attention`` takes q [B, H, M, D] on caches [B, Hkv, capacity, D]."""
    single = q.shape[0] == 1 and q.shape[2] == 1
    known = q.dtype == keys.dtype and q.dtype in _TYPES and q.shape[3] in HEAD_DIMS
    return q.is_cuda and single and known and keys.is_contiguous()


@cache
def slices_of(capacity: int, heads: int, processors: int) -> int:
    """Slices of a cache, each read by blocks of its own, that take the least time on so many multiprocessors."""

    def cost(slices: int) -> int:
        rounds = -(-heads * slices // processors)
        merge = _MERGE + slices * _MERGED_SLICE if slices > 1 else 0
        return rounds * (_ROUND + -(-capacity // slices)) + merge

    least = -(-capacity // SLICE_ENTRIES)
    return min(range(least, max(least, _MOST_SLICES) + 1), key=cost)


def can_turn(q: Tensor, turn: tuple[Tensor, Tensor]) -> bool:
    """Whether ``attention`` turns q [..., D] by these."""
    return all(part.dtype == q.dtype and part.numel() == q.shape[-1] and part.is_contiguous() for part in turn)


def attention(
    q: Tensor, token: Token, cache: tuple[Tensor, Tensor], mask: Tensor, scale: float, query_scale: float = 1.0
) -> Tensor:
    """softmax(scale (query_scale q) keys^T) values of one token, where mask [1, 1, 1, capacity] is true.

    q: [1, H, 1, D]; its product with query_scale is rounded, then turned with the token's key. cache: keys and values
    [1, Hkv, capacity, D], where the token's are written; what lies behind it there does not count. Hkv a divisor of H.
    Only q and the token's key and value may come from the kernel queued last with overlap: the rest is read before that
    one ends.
    Returns [1, 1, H, D].
    """
    _, heads, _, width = q.shape
    keys, values = cache
    capacity, dtype = keys.shape[2], DTYPE_CODES[q.dtype]
    slices = slices_of(capacity, heads, processor_count(q.device))
    longest = -(-capacity // (slices * SLICE_STEP)) * SLICE_STEP
    y = torch.empty(1, 1, heads, width, dtype=q.dtype, device=q.device)
    parts: tuple[Tensor | None, Tensor | None] = (None, None)
    if slices > 1:
        made = torch.empty(heads * slices * (width + 2), dtype=torch.float32, device=q.device)
        parts = made[: heads * slices * width], made[heads * slices * width :]
    own = q.contiguous(), token.key.contiguous(), token.value.contiguous()
    pointers = *own, keys, values, mask, token.position, *(token.turn or (None, None)), y, *parts
    launch(
        attention_unit(width, dtype),
        q.device,
        grid=(heads, slices),
        block=(ATTENTION_THREADS,),
        args=(*pointers, heads // keys.shape[1], capacity, query_scale, scale),
        shared_mem=longest * _FLOAT_BYTES,
        overlap=True,
    )
    if slices > 1:
        launch(
            merge_unit(width, dtype), q.device, grid=(heads,), block=(width,), args=(*parts, y, slices), overlap=True
        )
    return y


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Whether ``gated`` takes these."""
    whole = gate.numel() % _VECTOR_VALUES == 0 and all(t.data_ptr() % _VECTOR_BYTES == 0 for t in (gate, up))
    same = gate.shape == up.shape and gate.dtype == up.dtype and gate.is_contiguous() and up.is_contiguous()
    return gate.is_cuda and gate.dtype in _TYPES and same and whole


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate), rounded, times up; both contiguous and of one shape. activation: of ACTIVATIONS."""
    y = torch.empty_like(gate)
    launch(
        gated_unit(DTYPE_CODES[gate.dtype]),
        gate.device,
        grid=(-(-gate.numel() // (_VECTOR_VALUES * GATED_THREADS)),),
        block=(GATED_THREADS,),
        args=(gate, up, y, gate.numel(), ACTIVATIONS[activation].number),
        overlap=True,
    )
    return y
