"""Whether a benchmark fits into memory, asked before anything is made: where it runs out, systems kill the process."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from quantkit.bench.shapes import ModelShape, shape_config
from quantkit.errors import BenchError
from quantkit.memory import free_bytes
from quantkit.models.families import decoder_blocks

LinearBytes = Callable[[int, int, int], int]
"""(number of a Linear counted through the blocks, N, K) -> bytes it takes packed."""

_ROOM = 1.15  # beside weights: a cache, activations of a few tokens, workspace


def fits(needed: float, device: torch.device) -> bool:
    """Whether so many bytes of weights, and what goes with them, are free."""
    return needed * _ROOM <= free_bytes(device)


def check_fits(what: str, needed: float, device: torch.device) -> None:
    """Raise BenchError, naming both sizes, where fits() is false."""
    if not fits(needed, device):
        where = "the GPU" if device.type == "cuda" else "this machine"
        wanted, free = needed * _ROOM / 1e9, free_bytes(device) / 1e9
        raise BenchError(
            f"{what}: needs about {wanted:.1f} GB of memory, and {where} has {free:.1f} GB free; "
            "choose a smaller shape, fewer bits or another device"
        )


def model_bytes(shape: ModelShape, dtype: torch.dtype, linear_bytes: LinearBytes | None = None) -> int:
    """Parameters of a shape in ``dtype``; with ``linear_bytes`` its blocks' Linears packed.

    A packed model is made from one block in floating point, which is counted too.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_config(shape), dtype=dtype)
    ((_, block),) = decoder_blocks(model)
    block_bytes = _bytes(block)
    if linear_bytes is None:
        return _bytes(model) + (shape.layers - 1) * block_bytes
    weights = [module.weight for module in block.modules() if isinstance(module, nn.Linear)]
    kept = block_bytes - sum(weight.nbytes for weight in weights)
    every = enumerate(weight.shape for _ in range(shape.layers) for weight in weights)
    return _bytes(model) + shape.layers * kept + sum(linear_bytes(index, *size) for index, size in every)


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
