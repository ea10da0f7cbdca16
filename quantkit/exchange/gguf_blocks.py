"""The block types of GGUF as uniform grids.

Types without a minimum: w = d * scale * (q - zero). Types with one: w = d * scale * q - dmin * min. The bits of a block
are taken apart by the gguf package's own ``dequantize``: of the block with unit scales it gives the codes, and of the
block with all codes 0, or all bits 1, the lowest level or the steps. All of these are exact in its fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.exchange.grid import Grid

_ONE, _NONE = b"\x00\x3c", b"\x00\x00"  # 1 and 0 in fp16
Patch = tuple[int, bytes]  # where in a block, and the bytes to put there


@dataclass(frozen=True)
class BlockType:
    """One type.

    bits, group_size: of its grid. size, weights: bytes and weights of a block. codes: the spans of bytes that hold
    them. lowest: the byte that stands for the lowest codes there. unit: what makes every scale 1 and every minimum 0.
    zero: the code of weight 0, for types without a minimum. no_minimum: what makes every minimum 0, for types with one.
    """

    bits: int
    group_size: int
    size: int
    weights: int
    codes: tuple[tuple[int, int], ...]
    unit: tuple[Patch, ...]
    zero: int | None = None
    no_minimum: tuple[Patch, ...] = ()
    lowest: int = 0


_K_UNIT = ((0, _ONE), (2, _NONE), (4, b"\1\1\1\1\0\0\0\0\1\1\1\1"))
BLOCK_TYPES: dict[str, BlockType] = {
    "Q4_0": BlockType(4, 32, 18, 32, ((2, 18),), ((0, _ONE),), zero=8),
    "Q4_1": BlockType(4, 32, 20, 32, ((4, 20),), ((0, _ONE), (2, _NONE)), no_minimum=((2, _NONE),)),
    "Q5_0": BlockType(5, 32, 22, 32, ((2, 22),), ((0, _ONE),), zero=16),
    "Q5_1": BlockType(5, 32, 24, 32, ((4, 24),), ((0, _ONE), (2, _NONE)), no_minimum=((2, _NONE),)),
    "Q8_0": BlockType(8, 32, 34, 32, ((2, 34),), ((0, _ONE),), zero=128, lowest=0x80),
    "Q2_K": BlockType(
        2, 16, 84, 256, ((16, 80),), ((0, b"\1" * 16), (80, _ONE), (82, _NONE)), no_minimum=((82, _NONE),)
    ),
    "Q3_K": BlockType(
        3, 16, 110, 256, ((0, 96),), ((96, b"\x11" * 8 + b"\xaa" * 4), (108, _ONE)), zero=4
    ),  # scales are stored plus 32
    "Q4_K": BlockType(4, 32, 144, 256, ((16, 144),), _K_UNIT, no_minimum=((2, _NONE),)),
    "Q5_K": BlockType(5, 32, 176, 256, ((16, 176),), _K_UNIT, no_minimum=((2, _NONE),)),
    "Q6_K": BlockType(6, 16, 210, 256, ((0, 192),), ((192, b"\1" * 16), (208, _ONE)), zero=32),
}


def block_grid(blocks: Any, name: str, layer: str) -> Grid:
    """The levels of a weight. blocks: [N, bytes] uint8 of the type ``name``.

    Raises CheckpointError where a scale is NaN or infinite.
    """
    kind = BLOCK_TYPES[name]
    lowest = _groups(kind, _dequantized(_with_codes(blocks, kind, kind.lowest), name))
    if kind.zero is not None:
        step = lowest / -kind.zero
        grid = Grid(kind.bits, kind.group_size, step, zero=torch.full(step.shape, kind.zero, dtype=torch.int32))
    else:
        highest = _dequantized(_patched(_with_codes(blocks, kind, 0xFF), kind, kind.no_minimum), name)
        grid = Grid(kind.bits, kind.group_size, _groups(kind, highest) / (2**kind.bits - 1), minimum=lowest)
    if not bool(grid.step.isfinite().all() and grid.lowest.isfinite().all()):
        raise CheckpointError(f"{layer}: a scale is NaN or infinite; copy the file again")
    return grid


def block_codes(blocks: Any, name: str) -> Tensor:
    """[N, K] uint8."""
    kind = BLOCK_TYPES[name]
    return (_dequantized(_patched(blocks, kind, kind.unit), name) + (kind.zero or 0)).to(torch.uint8)


def _dequantized(blocks: Any, name: str) -> Tensor:
    """[N, K] fp32 by the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):
        return torch.from_numpy(np.ascontiguousarray(dequantize(blocks, GGMLQuantizationType[name])))


def _with_codes(blocks: Any, kind: BlockType, value: int) -> Any:
    """The blocks with every byte of their codes the same."""
    return _patched(blocks, kind, tuple((start, bytes([value]) * (stop - start)) for start, stop in kind.codes))


def _patched(blocks: Any, kind: BlockType, patches: tuple[Patch, ...]) -> Any:
    changed = blocks.reshape(blocks.shape[0], -1, kind.size).copy()
    for start, content in patches:
        changed[..., start : start + len(content)] = np.frombuffer(content, dtype=np.uint8)
    return changed.reshape(blocks.shape)


def _groups(kind: BlockType, values: Tensor) -> Tensor:
    """The first value of each group, [N, G] fp64; all of a group are equal."""
    return values[:, :: kind.group_size].double()
