"""The launches of the decoding kernels, each of which may start before its predecessor ends."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.cuda.architectures import WARP_THREADS
from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.cuda.parameters import Argument, Within
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.decode.instances import (
    GATED_THREADS,
    NORM_THREADS,
    PROMPT_THREADS,
    ROTARY_THREADS,
    AttentionBlock,
    attention_unit,
    combine_unit,
    gated_unit,
    norm_unit,
    prompt_unit,
    rotary_unit,
)
from quantkit.ops.decode.layout import VECTOR_VALUES, row_stride, token_stride
from quantkit.ops.decode.plan import head_blocks, split_length

_FLOAT_BYTES, _VECTOR_BYTES = 4, 16


@dataclass(frozen=True, eq=False)
class Token:
    """What one token of B sequences brings to attention: key and value [B, Hkv, 1, D], and position [1] int64, their
    place.

    rotary: cosine and sine, D values each of the key's type, of the rotary embedding that q and key lack, or None.
    Values i and i + D / 2 become x_i cos_i - x_(i + D/2) sin_i and x_(i + D/2) cos_(i + D/2) + x_i sin_(i + D/2), every
    product and sum rounded, as transformers does for Llama.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    rotary: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Splits:
    """What the splits of the cache leave for decodeCombine; None and None where there is a single one.

    sums: [B * H * count * D] fp32, weighted values. weights: [B * H * count * 2] fp32, largest score and sum of the
    weights.
    """

    count: int
    sums: Tensor | None = None
    weights: Tensor | None = None


def norm_launch(
    x: Tensor,
    addend: Tensor | None,
    *,
    parameters: tuple[Tensor, Tensor | None],
    epsilon: float,
    centered: bool,
    total: Argument,
    y: Argument,
) -> Launch:
    """y = norm of total = x + addend, all [..., K]; total is only written with an addend. parameters: weight, bias."""
    in_features = x.shape[-1]
    return Launch(
        norm_unit(centered, DTYPE_CODES[x.dtype], in_features),
        x.device,
        grid=(x.numel() // in_features,),
        block=NORM_THREADS,
        args={
            "x": x,
            "addend": addend,
            "weight": parameters[0],
            "bias": parameters[1],
            "sum": total,
            "y": y,
            "K": in_features,
            "epsilon": epsilon,
        },
        overlap=True,
    )


def gated_launch(gate: Tensor, up: Tensor, y: Tensor, activation: str) -> Launch:
    """y = activation(gate) * up, all of one shape; activation: of ACTIVATIONS."""
    strides = row_stride(gate), row_stride(up)
    assert strides[0] is not None
    assert strides[1] is not None
    return _gated_launch(gate, up, (strides[0], strides[1]), y, activation)


def gated_halves_launch(x: Tensor, y: Tensor, activation: str) -> Launch:
    """The same for gate and up as the halves of the rows of x [..., 2 N]."""
    width = y.shape[-1]
    return _gated_launch(x, Within(x, width * x.itemsize), (2 * width, 2 * width), y, activation)


def _gated_launch(gate: Tensor, up: Argument, strides: tuple[int, int], y: Tensor, activation: str) -> Launch:
    count = y.numel()
    return Launch(
        gated_unit(DTYPE_CODES[gate.dtype]),
        gate.device,
        grid=(-(-count // (VECTOR_VALUES * GATED_THREADS)),),
        block=GATED_THREADS,
        args={
            "gate": gate,
            "up": up,
            "y": y,
            "count": count,
            "width": y.shape[-1],
            "gateStride": strides[0],
            "upStride": strides[1],
            "activation": ACTIVATIONS[activation].number,
        },
        overlap=True,
    )


def rotate_launch(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, y: Tensor, head_dim: int) -> Launch:
    """y [M, Nq + Nk] = q [M, Nq] and k [M, Nk], in rows of vectors, with the rotary embedding of their positions."""
    vectors, half = head_dim // VECTOR_VALUES, cos_sin.shape[-1] // (2 * VECTOR_VALUES)
    heads = [part.shape[1] // head_dim for part in (q, k)]
    return Launch(
        rotary_unit(DTYPE_CODES[q.dtype]),
        q.device,
        grid=(q.shape[0], -(-sum(heads) * (vectors - half) // ROTARY_THREADS)),
        block=ROTARY_THREADS,
        args={
            "q": q,
            "k": k,
            "positions": positions,
            "cosSin": cos_sin,
            "y": y,
            "qStride": q.stride(0),
            "kStride": k.stride(0),
            "qHeads": heads[0],
            "kHeads": heads[1],
            "headVectors": vectors,
            "halfVectors": half,
        },
        overlap=True,
    )


def prompt_launch(
    heads: tuple[Tensor, Tensor, Tensor],
    rotary: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor],
    y: Tensor | None,
    query_scale: float,
) -> Launch:
    """Keys, turned, and values to the front of their cache, and queries, scaled and turned, to y where there is one."""
    q, k, v = heads
    sequences, query_heads, tokens, head_dim = q.shape
    (keys, values), (cosine, sine) = cache, rotary or (None, None)
    half, of_queries = head_dim // (2 * VECTOR_VALUES), 0 if y is None else query_heads
    return Launch(
        prompt_unit(DTYPE_CODES[k.dtype]),
        q.device,
        grid=(sequences * tokens, -(-(of_queries + 2 * k.shape[1]) * half // PROMPT_THREADS)),
        block=PROMPT_THREADS,
        args={
            "q": q,
            "k": k,
            "v": v,
            "cosine": cosine,
            "sine": sine,
            "y": y,
            "keys": keys,
            "values": values,
            "tokens": tokens,
            "angles": tokens if cosine is None else cosine.numel() // head_dim,
            "queryHeads": of_queries,
            "kvHeads": k.shape[1],
            "capacity": keys.shape[2],
            "queryStride": token_stride(q) or 0,
            "keyStride": token_stride(k) or 0,
            "valueStride": token_stride(v) or 0,
            "halfVectors": half,
            "queryScale": query_scale,
        },
        overlap=True,
    )


def attention_launch(
    q: Tensor,
    token: Token,
    *,
    cache: tuple[Tensor, Tensor],
    mask: Tensor,
    scales: tuple[float, float],
    y: Tensor,
    splits: Splits,
    block: AttentionBlock,
) -> Launch:
    """Attention of one token of B sequences, into y or, of several splits, into theirs.

    scales: of the scores and of the query.
    """
    sequences, heads, _, head_dim = q.shape
    q, key, value = map(_even_heads, (q, token.key, token.value))
    (keys, values), (cosine, sine), (scale, query_scale) = cache, token.rotary or (None, None), scales
    kv_heads, capacity = keys.shape[1:3]
    scores, warps = split_length(capacity, splits.count), block.threads // WARP_THREADS
    return Launch(
        attention_unit(head_dim, DTYPE_CODES[q.dtype], block),
        q.device,
        grid=(head_blocks(kv_heads, heads // kv_heads, block), splits.count, sequences),
        block=block.threads,
        args={
            "q": q,
            "key": key,
            "value": value,
            "keys": keys,
            "values": values,
            "mask": mask,
            "position": token.position,
            "cosine": cosine,
            "sine": sine,
            "y": y,
            "sums": splits.sums,
            "weights": splits.weights,
            "kvHeads": kv_heads,
            "headsPerKv": heads // kv_heads,
            "capacity": capacity,
            "queryStride": q.stride(0),
            "keyStride": key.stride(0),
            "valueStride": value.stride(0),
            "maskStride": capacity if mask.shape[0] > 1 else 0,
            "queryScale": query_scale,
            "scale": scale,
        },
        shared_mem=(scores + warps * head_dim) * block.heads * _FLOAT_BYTES,
        overlap=True,
    )


def _even_heads(x: Tensor) -> Tensor:
    """x [B, H, 1, D] with the heads of a sequence one behind the other in whole vectors; copied where they are not."""
    _, heads, _, head_dim = x.shape
    together = x.stride(3) == 1 and (heads == 1 or x.stride(1) == head_dim)
    aligned = x.data_ptr() % _VECTOR_BYTES == 0 and (x.shape[0] == 1 or x.stride(0) % VECTOR_VALUES == 0)
    return x if together and aligned else x.contiguous()


def combine_launch(splits: Splits, y: Tensor) -> Launch:
    """y [B, 1, H, D] from what several splits left."""
    sequences, _, heads, head_dim = y.shape
    return Launch(
        combine_unit(head_dim, DTYPE_CODES[y.dtype]),
        y.device,
        grid=(sequences * heads,),
        block=head_dim,
        args={"sums": splits.sums, "weights": splits.weights, "y": y, "splits": splits.count},
        overlap=True,
    )
