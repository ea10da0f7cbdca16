"""The fixed rotation of a Linear's input: Hadamard blocks of up to 256 columns, behind signs.

    rotate(x) = x Q,   Q = diag(signs) (I kron H_w) / sqrt(w)
    w = the largest power of two that divides K, at most 256

Q is orthogonal, so W x = (W Q) (Q^T x): outlier columns are spread over their block, and nothing has to be stored.
Source: QuaRot (Ashkboos et al. 2024, section 4.2). Deviation: blocks of at most 256 columns, which a warp holds in its
registers, where QuaRot takes all of K; and signs, without which the mean of a block gathers in its first column.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from quantkit.errors import RecipeError

WIDEST_BLOCK = 256
NARROWEST_BLOCK = 8

SIGN_WORDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89)
"""Bit i of word j: whether column 32 j + i of every 256 changes its sign. The first 256 bits behind pi's point."""

SIGN_CONSTANTS = {f"SIGNS_{number}": word for number, word in enumerate(SIGN_WORDS)}
"""The same as kernels take them."""


def block_width(columns: int) -> int:
    """Columns of a Hadamard block. Raises RecipeError where K has no block of 8 columns."""
    width = min(WIDEST_BLOCK, columns & -columns)
    if width < NARROWEST_BLOCK:
        raise RecipeError(
            f"rotate_inputs needs a K that is a multiple of {NARROWEST_BLOCK}, not {columns}; set rotate_inputs=false"
        )
    return width


def rotate(x: Tensor) -> Tensor:
    """x Q for x [..., K], fp32: additions in a fixed order and one multiplication, as kernels do it bit for bit."""
    return _blocks(x.float() * _signs(x))


def unrotate(x: Tensor) -> Tensor:
    """x Q^T for x [..., K], fp32: the inverse of rotate up to rounding."""
    return _blocks(x.float()) * _signs(x)


def unrotate_by_product(x: Tensor) -> Tensor:
    """``unrotate`` up to rounding, by a product with a block, and so is its gradient: fewer passes over memory."""
    blocks = x.float().unflatten(-1, (-1, block_width(x.shape[-1])))
    return (blocks @ _block(blocks.shape[-1], x.device)).flatten(-2) * _signs(x)


@cache
def _block(width: int, device: torch.device) -> Tensor:
    return _blocks(torch.eye(width, device=device))


def _blocks(x: Tensor) -> Tensor:
    width, distance = block_width(x.shape[-1]), 1
    y = x
    while distance < width:
        pairs = y.unflatten(-1, (-1, 2, distance))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return y * inverse_root(width)


def inverse_root(width: int) -> float:
    """1 / sqrt(width), rounded to fp32."""
    return torch.tensor(width, dtype=torch.float64).rsqrt().float().item()


def _signs(x: Tensor) -> Tensor:
    return _first_signs(x.shape[-1], x.device)


@cache  # a copy from the host makes it wait for the GPU, and cannot be captured
def _first_signs(columns: int, device: torch.device) -> Tensor:
    bits = [word >> i & 1 for word in SIGN_WORDS for i in range(32)]
    signs = 1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32, device=device)
    return signs.repeat(-(-columns // WIDEST_BLOCK))[:columns]
