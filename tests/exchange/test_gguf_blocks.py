"""Blocks by hand, and every type against the gguf package's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.exchange.gguf_blocks import BLOCK_TYPES, BlockType, block_codes, block_grid
from quantkit.exchange.grid import fitted
from quantkit.formats.table import dequantize

gguf = pytest.importorskip("gguf")

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Steps and minima of K types are products of an fp16 number and one of 4 to 8 bits. Rounded to fp16, each plane and the
# offset move by 2**-11 of themselves at most; the planes add up to less than twice the largest weight.
K_ROUNDING = 3 * 2**-11
SCALE_FIELDS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2)}
SCALE_FIELDS |= {"Q5_1": (0, 2), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}


def _half(value: float) -> list[int]:
    return list(np.float16(value).tobytes())


def random_blocks(name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks [rows, bytes] of random bits with scales of usual size; minima of the same order as their steps."""
    kind = BLOCK_TYPES[name]
    count = columns // kind.weights
    blocks = rng.integers(0, 256, (rows, count, kind.size), dtype=np.uint8)
    for start in SCALE_FIELDS[name]:
        scales = rng.uniform(1e-3, 2e-2, (rows, count)).astype(np.float16)
        blocks[..., start : start + 2] = scales.view(np.uint8).reshape(rows, count, 2)
    return blocks.reshape(rows, -1)


def _random(name: str, kind: BlockType) -> np.ndarray:
    return random_blocks(name, 3, 2 * kind.weights, np.random.default_rng(0))


def _reference(name: str, blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]))


def _block(*content: int) -> np.ndarray:
    return np.array([content], dtype=np.uint8)


def test_q4_0_block_by_hand() -> None:
    """Byte i holds code i below and code i + 16 above; w = d (q - 8)."""
    block = _block(*_half(0.5), *[0xF0 + i for i in range(16)])
    assert block_codes(block, "Q4_0").tolist() == [[*range(16), *[15] * 16]]
    grid = block_grid(block, "Q4_0", "layer")
    assert (grid.step.tolist(), grid.zero.tolist() if grid.zero is not None else None) == ([[0.5]], [[8]])


def test_q5_1_block_by_hand() -> None:
    """d, m, then the fifth bits of all 32 codes, then nibbles as in Q4_0; w = d q + m."""
    block = _block(*_half(0.25), *_half(-3.0), 0b1, 0, 0, 0b10000000, *[0x21] * 16)
    codes = [[17, *[1] * 15, *[2] * 15, 18]]
    assert block_codes(block, "Q5_1").tolist() == codes
    grid = block_grid(block, "Q5_1", "layer")
    assert grid.step.tolist() == [[0.25]]
    assert grid.lowest.tolist() == [[-3.0]]


def test_q8_0_block_by_hand() -> None:
    block = _block(*_half(-0.125), 0x80, 0x7F, *[0] * 30)
    assert block_codes(block, "Q8_0").tolist() == [[0, 255, *[128] * 30]]
    assert block_grid(block, "Q8_0", "layer").step.tolist() == [[-0.125]]


def test_q6_k_block_by_hand() -> None:
    """ql[128], qh[64], scales[16] int8, d; code 0 is ql[0]'s low nibble and qh[0]'s low two bits."""
    block = _block(0x0F, *[0] * 127, 0b11, *[0] * 63, 3, 0xFF, *[1] * 14, *_half(0.5))
    assert block_codes(block, "Q6_K")[0, :3].tolist() == [63, 0, 0]
    assert block_grid(block, "Q6_K", "layer").step[0, :3].tolist() == [1.5, -0.5, 0.5]


def _first(name: str, block: np.ndarray, group: int) -> tuple[int, float, float]:
    """The first code of a group, the group's step and its lowest level."""
    grid, codes = block_grid(block, name, "layer"), block_codes(block, name)
    place = group * BLOCK_TYPES[name].group_size
    return int(codes[0, place]), grid.step[0, group].item(), grid.lowest[0, group].item()


def test_q4_1_block_by_hand() -> None:
    """d, m, then nibbles as in Q4_0; w = d q + m."""
    block = _block(*_half(0.5), *_half(-2.0), 0x9E, *[0] * 15)
    assert block_codes(block, "Q4_1").tolist() == [[14, *[0] * 15, 9, *[0] * 15]]
    assert _first("Q4_1", block, 0) == (14, 0.5, -2.0)


def test_q5_0_block_by_hand() -> None:
    """d, the fifth bits of all 32 codes, then nibbles as in Q4_0; w = d (q - 16)."""
    block = _block(*_half(0.25), 0b10, 0, 1, 0, 0x21, *[0] * 15)
    assert block_codes(block, "Q5_0").tolist() == [[1, 16, *[0] * 14, 18, *[0] * 15]]
    assert _first("Q5_0", block, 0) == (1, 0.25, -4.0)


def test_q2_k_block_by_hand() -> None:
    """scales[16] with a scale below and a minimum above, qs[64], d, dmin; code 32 is bits 2 and 3 of qs[0]."""
    block = _block(0x53, 0x10, 0x02, *[0x01] * 13, 0b1001, *[0] * 63, *_half(0.5), *_half(0.25))
    assert _first("Q2_K", block, 0) == (1, 1.5, -1.25)
    assert _first("Q2_K", block, 1) == (0, 0.0, -0.25)
    assert _first("Q2_K", block, 2) == (2, 1.0, 0.0)


def test_q3_k_block_by_hand() -> None:
    """hmask[32], qs[64], scales[12] plus 32 in nibbles and pairs of bits, d; code 0's third bit is hmask[0]'s first."""
    scales = [0x25, *[0x11] * 7, 0b1010_1011, *[0xAA] * 3]  # scale 0: 0b11_0101; scale 8: 0b10_0010
    block = _block(0b00001, *[0] * 31, 0b11, *[0] * 63, *scales, *_half(0.5))
    assert _first("Q3_K", block, 0) == (7, (0b110101 - 32) * 0.5, -4 * (0b110101 - 32) * 0.5)
    assert _first("Q3_K", block, 8) == (0, (0b100010 - 32) * 0.5, -4 * (0b100010 - 32) * 0.5)


def test_q4_k_block_by_hand() -> None:
    """d, dmin, scales[12], qs[128]: six bits of scale 0 in byte 0, of minimum 0 in byte 4; of scale 4 the low four in
    byte 8 and the high two atop byte 0; of minimum 4 likewise atop bytes 8 and 4."""
    scales = [0b01_000011, 5, 0, 0, 0b10_000010, 1, 0, 0, 0b0011_0111, 0, 0, 0]
    block = _block(*_half(0.5), *_half(0.25), *scales, 0xC9, *[0] * 127)
    assert _first("Q4_K", block, 0) == (9, 1.5, -0.5)
    assert _first("Q4_K", block, 1) == (12, 2.5, -0.25)
    assert _first("Q4_K", block, 4) == (0, 0b01_0111 * 0.5, -0b10_0011 * 0.25)


def test_q5_k_block_by_hand() -> None:
    """As Q4_K, with the fifth bits of eight groups in the bits of qh[32], before qs[128]."""
    scales = [3, 5, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]
    block = _block(*_half(0.5), *_half(0.25), *scales, 0b10, *[0] * 31, 0xC9, *[0] * 127)
    assert _first("Q5_K", block, 0) == (9, 1.5, -0.5)
    assert _first("Q5_K", block, 1) == (28, 2.5, -0.25)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_levels_are_those_of_the_gguf_package(name: str) -> None:
    blocks = _random(name, BLOCK_TYPES[name])
    grid, codes = block_grid(blocks, name, "layer"), block_codes(blocks, name)
    assert int(codes.max()) < 2 ** BLOCK_TYPES[name].bits
    assert torch.equal(grid.levels(codes).float(), _reference(name, blocks))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_types_with_fp16_scales_are_stored_exactly(name: str) -> None:
    blocks = _random(name, BLOCK_TYPES[name])
    fit = fitted(block_grid(blocks, name, "layer"), "layer", exact=True)
    assert fit.extra_planes == (0 if BLOCK_TYPES[name].zero is not None else 2)
    assert torch.equal(dequantize(fit.pack(block_codes(blocks, name))), _reference(name, blocks))


@pytest.mark.parametrize("name", K_TYPES)
def test_types_with_products_as_scales_are_rounded_and_refused_where_exactness_is_asked_for(name: str) -> None:
    blocks = _random(name, BLOCK_TYPES[name])
    grid, codes = block_grid(blocks, name, "layer"), block_codes(blocks, name)
    fit = fitted(grid, "layer", exact=False)
    assert 0 < fit.error <= K_ROUNDING
    highest = grid.lowest + grid.step * (2**grid.bits - 1)
    largest = grid.per_column(torch.maximum(grid.lowest.abs(), highest.abs()), codes.shape[1])
    error = (dequantize(fit.pack(codes)).double() - grid.levels(codes)).abs()
    assert bool((error <= largest * (fit.error + 1e-6)).all())
    with pytest.raises(CheckpointError, match="layer: its levels are not exact"):
        fitted(grid, "layer", exact=True)


def test_products_that_fit_fp16_are_exact() -> None:
    """Q6_K with powers of two as scales."""
    block = _block(*range(128), *range(64), *[1, 2, 4, 8] * 4, *_half(0.01))
    fit = fitted(block_grid(block, "Q6_K", "layer"), "layer", exact=True)
    assert torch.equal(dequantize(fit.pack(block_codes(block, "Q6_K"))), _reference("Q6_K", block))


def test_infinite_scales_are_refused() -> None:
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        block_grid(_block(*_half(np.inf), *[0] * 16), "Q4_0", "layer")
