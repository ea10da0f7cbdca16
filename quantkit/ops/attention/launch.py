"""The launches of the INT8 attention kernels, and attention through both of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.cuda.parameters import Argument
from quantkit.ops.attention.instances import BOOL_MASK, QUANTIZE_THREADS, AttentionForm
from quantkit.ops.attention.layout import TILE_KEYS

_LEAST_EXPONENT_STEP = 1e-30  # leaves every code of P at 127, and -inf as it is, where 0 would make it NaN


@dataclass(frozen=True)
class Problem:
    """What both forms read and write. steps: of the codes of Q and V, and of a score."""

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

    def args(self) -> dict[str, Argument]:
        """What both kernels take."""
        _, heads, tokens, _ = self.query.shape
        return {
            "query": self.query,
            "tiles": self.tiles,
            "out": self.out,
            "queryStep": self.steps[0],
            "valueStep": self.steps[1],
            "exponentStep": self.exponent_step,
            **_strides("query", self.query),
            "M": tokens,
            "T": self.keys,
            "group": heads // self.kv_heads,
            "valueDims": self.out.shape[-1],
            "causal": int(self.causal),
            "dtype": DTYPE_CODES[self.query.dtype],
        }


def _strides(name: str, x: Tensor) -> dict[str, Argument]:
    """Strides of batch, head and row of x [B, H, M, D], and a row's length."""
    batch, head, row, _ = x.stride()
    return {f"{name}Batch": batch, f"{name}Head": head, f"{name}Row": row, f"{name}Dims": x.shape[-1]}


def quantize_launch(
    form: AttentionForm, head_dim: int, *, key: Tensor, value: Tensor, tiles: Tensor, steps: Sequence[float]
) -> Launch:
    """Codes of K and V in the tiles of a form; steps: of Q, K and V."""
    batch, kv_heads, keys, _ = key.shape
    return Launch(
        form.quantize_unit(head_dim),
        key.device,
        grid=(-(-keys // form.tile_keys) * form.tile_keys // TILE_KEYS, kv_heads, batch),
        block=QUANTIZE_THREADS,
        args={
            "keys": key,
            "values": value,
            "tiles": tiles,
            "keyStep": steps[1],
            "valueStep": steps[2],
            **_strides("key", key),
            **_strides("value", value),
            "T": keys,
            "dtype": DTYPE_CODES[key.dtype],
        },
    )


def wgmma_launch(form: AttentionForm, head_dim: int, problem: Problem, processors: int) -> Launch:
    """Attention on products of warpgroups."""
    batch, heads, tokens, _ = problem.query.shape
    items = -(-tokens // form.block_tokens(head_dim)) * heads * batch
    return Launch(
        form.unit(head_dim),
        problem.query.device,
        grid=(min(items, processors),),
        block=form.threads,
        args={**problem.args(), "heads": heads, "items": items},
    )


def mma_launch(form: AttentionForm, head_dim: int, problem: Problem, mask: Tensor | None) -> Launch:
    """Attention on products of warps; mask: broadcastable to [B, H, M, T]."""
    batch, heads, tokens, _ = problem.query.shape
    strides: tuple[int, ...] = (0, 0, 0, 0)
    mask_dtype = 0
    args = problem.args()
    if mask is not None:
        strides = mask.expand(batch, heads, tokens, problem.keys).stride()
        mask_dtype = BOOL_MASK if mask.dtype == torch.bool else DTYPE_CODES[mask.dtype]
        if mask_dtype != BOOL_MASK:
            args["exponentStep"] = math.log2(math.e)  # scores are then no longer integers
    names = ("maskBatch", "maskHead", "maskRow", "maskKey")
    of_mask = {"mask": mask, **dict(zip(names, strides, strict=True)), "maskDtype": mask_dtype}
    return Launch(
        form.unit(head_dim),
        problem.query.device,
        grid=(-(-tokens // form.block_tokens(head_dim)), heads, batch),
        block=form.threads,
        args={**args, **of_mask, "scoreUnit": problem.steps[2]},
    )
