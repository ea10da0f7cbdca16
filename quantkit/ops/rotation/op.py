"""The op ``quantkit::rotate_inputs``: activations times the Hadamard blocks of formats/hadamard.py.

It stands in front of the products of formats whose kernels take activations as they are. On a GPU one kernel does it,
with the bits of the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.cuda.launch import DTYPE_CODES, Launch
from quantkit.formats.hadamard import WIDEST_BLOCK, block_width, inverse_root, rotate
from quantkit.ops.registry import define_op
from quantkit.ops.rotation.instances import ROTATE_THREADS, ROTATE_WARPS, rotate_unit

_VECTOR_BYTES = 16


class RotateInputs(NamedTuple):
    """x Q in x's dtype for x [..., K], K a multiple of 8."""

    x: Tensor


def _rotate_cuda(op: RotateInputs) -> Tensor:
    x = op.x.contiguous()
    if x.data_ptr() % _VECTOR_BYTES:
        x = x.clone()
    y, k = torch.empty_like(x), x.shape[-1]
    width, runs = block_width(k), x.numel() // k * -(-k // WIDEST_BLOCK)
    if runs:
        Launch(
            rotate_unit(DTYPE_CODES[x.dtype]),
            x.device,
            grid=(-(-runs // ROTATE_WARPS),),
            block=ROTATE_THREADS,
            args={"x": x, "y": y, "K": k, "runs": runs, "width": width, "root": inverse_root(width)},
            overlap=True,
        ).run()
    return y


_SAMPLE_SHAPES = ((1, 8), (3, 40), (1, 5, 1408), (7, 1024), (2, 14336))


def _samples() -> Iterator[RotateInputs]:
    """Blocks of every kind of width, of one row and several; every type."""
    for shape in _SAMPLE_SHAPES:
        yield from (RotateInputs(torch.randn(shape).to(dtype)) for dtype in DTYPE_CODES)


rotate_inputs = define_op(
    "rotate_inputs",
    RotateInputs,
    reference=lambda op: rotate(op.x).to(op.x.dtype),
    cuda=_rotate_cuda,
    fake=lambda op: op.x.new_empty(op.x.shape),
    samples=_samples,
)
