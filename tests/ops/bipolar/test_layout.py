"""The tile order of bipolar operands against the layout that kernels/bipolar/planes.cuh draws."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.layout import plane_row_sums, tile_lines, untile_lines

SHAPES = [(1, 1), (7, 65), (65, 1030), (130, 2048)]
BLOCK, LINE, CHUNK = 64, 128, 16


@pytest.mark.parametrize("shape", SHAPES, ids=[f"{n}x{k}" for n, k in SHAPES])
@pytest.mark.parametrize("bits", [1, 3], ids="{}-bit".format)
def test_tiles_hold_every_byte_where_the_kernels_look(bits: int, shape: tuple[int, int]) -> None:
    rows, k = shape
    planes = pack_codes(torch.randint(0, 1 << bits, (rows, k), dtype=torch.uint8), bits)
    tiles = tile_lines(planes)
    k_tiles = -(-planes.shape[2] // LINE)
    assert tiles.shape == (-(-rows // BLOCK), k_tiles, bits, BLOCK, LINE)
    flat = tiles.flatten()
    for plane, row, byte in [
        (0, 0, 0),
        (bits - 1, rows - 1, planes.shape[2] - 1),
        (0, rows // 2, planes.shape[2] // 2),
    ]:
        block, k_tile, chunk = row // BLOCK, byte // LINE, byte % LINE // CHUNK
        line = (((block * k_tiles + k_tile) * bits + plane) * BLOCK + row % BLOCK) * LINE
        offset = line + (chunk ^ (row % 8)) * CHUNK + byte % CHUNK
        assert flat[offset] == planes[plane, row, byte]


@pytest.mark.parametrize("shape", SHAPES, ids=[f"{n}x{k}" for n, k in SHAPES])
def test_untile_is_the_inverse(shape: tuple[int, int]) -> None:
    planes = pack_codes(torch.randint(0, 8, shape, dtype=torch.uint8), 3)
    assert torch.equal(untile_lines(tile_lines(planes), shape[0], planes.shape[2]), planes)


def test_padding_is_zero() -> None:
    tiles = tile_lines(torch.full((1, 3, 5), 255, dtype=torch.uint8))
    assert tiles.sum().item() == 255 * 3 * 5


def test_row_sums_are_sums_of_codes() -> None:
    codes = torch.randint(0, 32, (9, 70), dtype=torch.uint8)
    assert torch.equal(plane_row_sums(pack_codes(codes, 5), 70), codes.sum(1, dtype=torch.int32))
