"""The tile order of bipolar operands against the layout that kernels/bipolar/planes.cuh draws."""

from __future__ import annotations

import pytest
import torch

from quantkit.formats.bipolar import codes_to_values
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.layout import (
    LINES,
    plane_group_sums,
    plane_row_sums,
    tile_lines,
    tile_scales,
    untile_lines,
    untile_scales,
)
from quantkit.ops.bipolar.weight import tiled_weight

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


@pytest.mark.parametrize("group_size", [-1, 128, 384])
def test_row_sums_of_scale_codes_are_sums_of_bytes(group_size: int) -> None:
    codes = torch.randint(0, 16, (9, 1030), dtype=torch.uint8)
    scales = torch.randint(0, 9, (9, 1 if group_size == -1 else -(-1030 // group_size)), dtype=torch.uint8)
    weight = tiled_weight(pack_codes(codes, 4), scales, torch.ones(9, 1).half(), group_size, 1030)
    spread = scales.repeat_interleave(1030 if group_size == -1 else group_size, 1)[:, :1030]
    expected = (codes_to_values(codes, 4) * spread + 128).sum(1, dtype=torch.int32)
    assert torch.equal(weight.row_sums, expected)


def test_group_sums_are_sums_of_codes() -> None:
    codes = torch.randint(0, 32, (9, 300), dtype=torch.uint8)
    expected = torch.stack([part.sum(1, dtype=torch.int32) for part in codes.split(LINE, 1)], 1)
    assert torch.equal(plane_group_sums(pack_codes(codes, 5), 300, LINE), expected)


@pytest.mark.parametrize("shape", [(1, 264), (65, 1160), (130, 2048)], ids=str)
@pytest.mark.parametrize("group_size", [128, 256, 640])
def test_scale_codes_stand_where_the_kernel_reads_them(group_size: int, shape: tuple[int, int]) -> None:
    count, in_features = shape
    scales = torch.randint(0, 128, (count, -(-in_features // group_size)), dtype=torch.uint8)
    tiles = tile_scales(scales, group_size, in_features)
    assert tiles.shape == (-(-count // BLOCK), -(-in_features // 1024), LINES, BLOCK)
    for n in {0, count // 2, count - 1}:
        row = (n % 32 // 8) * 2 + (n % 8 // 2) * 8 + n % 2 + n % 64 // 32 * 32  # n % 64 == featureOfRow(row)
        for line in {0, -(-in_features // LINE) - 1}:
            warp, half, g = row // 16, row % 16 // 8, row % 8
            found = tiles[n // BLOCK, line // LINES, line % LINES, 16 * warp + 2 * g + half]
            assert found == scales[n, line * LINE // group_size]
    assert torch.equal(untile_scales(tiles, count, group_size, in_features), scales)


def test_the_one_scale_code_of_a_row_is_that_of_all_its_lines() -> None:
    scales = torch.randint(1, 128, (70, 1), dtype=torch.uint8)
    tiles = tile_scales(scales, 300, 300)
    assert (tiles[:, 0, :3].amax(1) == tiles[:, 0, :3].amin(1)).all()
    assert torch.equal(untile_scales(tiles, 70, 300, 300), scales)
