"""What runs between the products of one decoding step: norms, gated activations, attention and its cache.

The plain functions are GPU only, fp16 and bf16, and for CUDA graphs; attention writes its cache. Norms, gated
activations and rotary embeddings are torch ops, for engines that compile a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.cuda.launch import FixedLaunches, Launch
from quantkit.cuda.parameters import Pointer, Within
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.decode.launch import (
    Splits,
    Token,
    attention_launch,
    combine_launch,
    gated_halves_launch,
    gated_launch,
    norm_launch,
    prompt_launch,
    rotate_launch,
)
from quantkit.ops.decode.layout import DTYPES, gated_takes_halves, has_vector_rows, norm_takes, rotary_takes
from quantkit.ops.decode.plan import attention_block, head_blocks, split_count
from quantkit.ops.registry import define_op

_fixed = FixedLaunches()


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
    _run_norm(x, addend, parameters, epsilon, centered=centered, total=total, y=y)
    return total, y


def _run_norm(
    x: Tensor,
    addend: Tensor | None,
    parameters: tuple[Tensor, Tensor | None],
    epsilon: float,
    *,
    centered: bool,
    total: Tensor,
    y: Pointer,
) -> None:
    weight, bias = parameters
    key = ("norm", x.dtype, x.numel(), x.shape[-1], epsilon, centered, addend is None, bias is None)
    pointers = {"x": x, "addend": addend, "weight": weight, "bias": bias, "sum": total, "y": y}

    def launch() -> Launch:
        return norm_launch(x, addend, parameters=parameters, epsilon=epsilon, centered=centered, total=total, y=y)

    _fixed.run(key, launch, x.device, pointers)


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
    key = ("gate", gate.dtype, gate.shape, gate.stride(), up.stride(), activation)
    pointers: dict[str, Pointer | None] = {"gate": gate, "up": up, "y": y}
    _fixed.run(key, lambda: gated_launch(gate, up, y, activation), gate.device, pointers)
    return y


def place_prompt(
    heads: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor],
    query_scale: float | None,
) -> Tensor:
    """Queries [B, H, M, D] for attention; keys and values of M tokens of B sequences go to the front of their cache.

    heads: q [B, H, M, D], k and v [B, Hkv, M, D]. rotary: cosine and sine [1 or B, M, D] as Token has them, or None.
    cache: keys and values [B, Hkv, capacity, D]. query_scale: its product with q is rounded before that is turned.
    """
    q, k, v = heads
    changed = rotary is not None or query_scale is not None
    y = torch.empty(q.shape[0], q.shape[2], *q.shape[1::2], dtype=q.dtype, device=q.device) if changed else None
    scale = 1.0 if query_scale is None else query_scale
    cosine, sine = rotary or (None, None)
    angles = 0 if cosine is None else cosine.numel()
    key = ("prompt", q.dtype, *(part.shape for part in (q, k, cache[0])), angles, changed, scale)
    strides = tuple(part.stride() for part in heads)
    names = ("q", "k", "v", "cosine", "sine", "y", "keys", "values")
    pointers = dict(zip(names, (q, k, v, cosine, sine, y, *cache), strict=True))
    _fixed.run((*key, strides), lambda: prompt_launch(heads, rotary, cache, y, scale), q.device, pointers)
    return q if y is None else y.transpose(1, 2)


class RmsNorm(NamedTuple):
    """round(x / rms(x)) * weight for x [..., K] and weight [K] of one type."""

    x: Tensor
    weight: Tensor
    epsilon: float


class AddRmsNorm(NamedTuple):
    """[2, ..., K]: total = x + addend, rounded, and RmsNorm of it; addend of x's shape and type."""

    x: Tensor
    addend: Tensor
    weight: Tensor
    epsilon: float


class GatedHalves(NamedTuple):
    """round(activation(gate)) * up [..., N] for x = (gate, up) [..., 2 N]; activation: of ACTIVATIONS."""

    x: Tensor
    activation: str


class RotateHeads(NamedTuple):
    """[M, Nq + Nk]: q [M, Nq] and k [M, Nk], heads of head_dim values, with the rotary embedding of their positions.

    cos_sin: [P, R] of q's type, cosines and then sines of a position. positions: [M] int64, below P. Of the first R
    values of a head i and i + R / 2 become x_i cos_i - x_(i + R/2) sin_i and x_(i + R/2) cos_i + x_i sin_i, computed in
    fp32 and rounded; the others stay.
    """

    q: Tensor
    k: Tensor
    positions: Tensor
    cos_sin: Tensor
    head_dim: int


def _rms_norm_reference(op: RmsNorm) -> Tensor:
    x = op.x.float()
    normal = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + op.epsilon)).to(op.x.dtype)
    return normal * op.weight


def _rms_norm_cuda(op: RmsNorm) -> Tensor:
    if not _takes_norm(op.x, op.weight):
        return _rms_norm_reference(op)
    x = op.x.contiguous()
    y = torch.empty_like(x)
    _run_norm(x, None, (op.weight, None), op.epsilon, centered=False, total=x, y=y)
    return y


def _add_rms_norm_reference(op: AddRmsNorm) -> Tensor:
    total = op.x + op.addend
    return torch.stack((total, _rms_norm_reference(RmsNorm(total, op.weight, op.epsilon))))


def _add_rms_norm_cuda(op: AddRmsNorm) -> Tensor:
    if not _takes_norm(op.x, op.weight):
        return _add_rms_norm_reference(op)
    x, addend = op.x.contiguous(), op.addend.contiguous()
    made = x.new_empty(2, *x.shape)
    y = Within(made, x.nbytes)
    _run_norm(x, addend, (op.weight, None), op.epsilon, centered=False, total=made, y=y)
    return made


def _takes_norm(x: Tensor, weight: Tensor) -> bool:
    return norm_takes(x.dtype, x.shape[-1]) and weight.dtype == x.dtype and x.numel() > 0


def _gated_reference(op: GatedHalves) -> Tensor:
    gate, up = op.x.chunk(2, -1)
    return ACTIVATIONS[op.activation].apply(gate) * up


def _gated_cuda(op: GatedHalves) -> Tensor:
    x, width = op.x, op.x.shape[-1] // 2
    if not gated_takes_halves(x) or not x.numel():
        return _gated_reference(op)
    y = x.new_empty(*x.shape[:-1], width)
    key = ("gated", x.dtype, x.numel(), width, op.activation)
    pointers: dict[str, Pointer | None] = {"gate": x, "up": Within(x, width * x.itemsize), "y": y}
    _fixed.run(key, lambda: gated_halves_launch(x, y, op.activation), x.device, pointers)
    return y


def _rotate_reference(op: RotateHeads) -> Tensor:
    cosines, sines = op.cos_sin[op.positions].float().unsqueeze(1).chunk(2, -1)
    half, heads = cosines.shape[-1], torch.cat((op.q, op.k), -1).unflatten(-1, (-1, op.head_dim)).float()
    first, second, rest = heads.split((half, half, op.head_dim - 2 * half), -1)
    turned = first * cosines - second * sines, second * cosines + first * sines, rest
    return torch.cat(turned, -1).flatten(-2).to(op.q.dtype)


def _rotate_cuda(op: RotateHeads) -> Tensor:
    q, k = (part if has_vector_rows(part) else part.contiguous() for part in (op.q, op.k))
    if not rotary_takes(q, op.cos_sin, op.head_dim) or k.dtype != q.dtype or not q.numel():
        return _rotate_reference(op)
    y = q.new_empty(q.shape[0], q.shape[1] + k.shape[1])
    positions = op.positions.contiguous()
    pointers: dict[str, Pointer | None] = {"q": q, "k": k, "positions": positions, "cosSin": op.cos_sin, "y": y}
    sizes = q.shape, k.shape[1], q.stride(0), k.stride(0), op.cos_sin.shape[-1], op.head_dim
    _fixed.run(
        ("rotate", q.dtype, *sizes),
        lambda: rotate_launch(q, k, positions, op.cos_sin, y, op.head_dim),
        q.device,
        pointers,
    )
    return y


_SAMPLE_SHAPES = ((1, 64), (3, 1, 4104), (5, 4096), (2, 100))
_SAMPLE_EPSILON = 1e-5


def _norm_samples() -> Iterator[RmsNorm]:
    for shape in _SAMPLE_SHAPES:
        for dtype in (*DTYPES, torch.float32):
            x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
            yield RmsNorm(x, weight, _SAMPLE_EPSILON)


def _add_norm_samples() -> Iterator[AddRmsNorm]:
    for x, weight, epsilon in _norm_samples():
        yield AddRmsNorm(x, torch.randn(x.shape).to(x.dtype), weight, epsilon)


def _gated_samples() -> Iterator[GatedHalves]:
    for x, _, _ in _norm_samples():
        yield from (GatedHalves(x, activation) for activation in ("silu", "relu"))


def _rotate_samples() -> Iterator[RotateHeads]:
    for tokens, heads, head_dim, width in (
        (1, (4, 1), 64, 64),
        (5, (3, 3), 128, 64),
        (70, (2, 1), 40, 16),
        (3, (1, 1), 12, 4),
    ):
        for dtype in (*DTYPES, torch.float32):
            both = torch.randn(tokens, sum(heads) * head_dim + 8).to(dtype)
            q, k, _ = both.split((heads[0] * head_dim, heads[1] * head_dim, 8), -1)
            cos_sin, positions = torch.rand(100, width).to(dtype), torch.randint(0, 100, (tokens,))
            yield RotateHeads(q, k, positions, cos_sin, head_dim)


rms_norm = define_op(
    "rms_norm",
    RmsNorm,
    reference=_rms_norm_reference,
    cuda=_rms_norm_cuda,
    fake=lambda op: op.x.new_empty(op.x.shape),
    samples=_norm_samples,
)
add_rms_norm = define_op(
    "add_rms_norm",
    AddRmsNorm,
    reference=_add_rms_norm_reference,
    cuda=_add_rms_norm_cuda,
    fake=lambda op: op.x.new_empty(2, *op.x.shape),
    samples=_add_norm_samples,
)
gated_halves = define_op(
    "gated_halves",
    GatedHalves,
    reference=_gated_reference,
    cuda=_gated_cuda,
    fake=lambda op: op.x.new_empty(*op.x.shape[:-1], op.x.shape[-1] // 2),
    samples=_gated_samples,
)
rotate_heads = define_op(
    "rotate_heads",
    RotateHeads,
    reference=_rotate_reference,
    cuda=_rotate_cuda,
    fake=lambda op: op.q.new_empty(op.q.shape[0], op.q.shape[1] + op.k.shape[1]),
    samples=_rotate_samples,
)
