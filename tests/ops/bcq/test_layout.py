from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.formats.bcq import SCALE_BITS, group_width
from quantkit.formats.planes import unpack_bits
from quantkit.ops.bcq.layout import TILE_K, is_grid, tile_counts, untile
from quantkit.ops.bcq.order import GRID_PLANES, Order
from tests.ops.bcq.cases import BcqWeight, random_weight

SHAPES = [(16, 256, 128), (33, 72, 64), (20, 576, 128), (7, 40, 8), (48, 520, -1), (16, 640, 320)]
SHAPE_IDS = [f"{n}x{k}-g{g}" for n, k, g in SHAPES]
PLANES = 16
FIXED_POINT_RTOL = 2.0**-12  # 16-bit planes with one scale per segment of Gaussian x: a few 2^-16, with slack


@pytest.mark.parametrize(
    ("order", "bits", "scale_bits"),
    [
        *((order, 3, scale_bits) for order in (Order.PLANES, Order.CODES) for scale_bits in SCALE_BITS),
        *((Order.GRID, bits, 16) for bits in GRID_PLANES),
    ],
)
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize(("n", "k", "group_size"), SHAPES, ids=SHAPE_IDS)
def test_restoring_tiles_gives_the_canonical_bits(
    n: int, k: int, group_size: int, offset: bool, order: Order, bits: int, scale_bits: int
) -> None:
    grid = order == Order.GRID
    weight = random_weight(bits, n, k, group_size, offset=offset, scale_bits=scale_bits, equal_steps=grid)
    before, after = weight.stored.named(), untile(weight.tiled(order)).named()
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("bits", GRID_PLANES)
def test_a_grid_has_planes_whose_scales_double_bit_for_bit(bits: int) -> None:
    weight = random_weight(bits, 40, 700, 128, offset=True, equal_steps=True)
    assert is_grid(weight.stored)
    assert weight.tiled(Order.GRID).scale_tiles.shape[3] == 2  # a step and an offset
    other = weight.stored.scales.clone()
    other[-1, 39, 5] *= 1 + 2.0**-10
    assert not is_grid(replace(weight.stored, scales=other))
    assert not is_grid(random_weight(3, 40, 700, 128, offset=True, equal_steps=True).stored)
    assert not is_grid(random_weight(bits, 40, 700, 128, offset=True, scale_bits=8).stored)


def test_sign_tiles_follow_the_drawing() -> None:
    weight = random_weight(2, 40, 700, 128, offset=False)
    tiles = weight.tiled().tiles
    bits = unpack_bits(weight.stored.signs, weight.in_features)
    for plane, row, column in [(0, 0, 0), (1, 7, 31), (0, 8, 32), (1, 21, 300), (0, 39, 699), (1, 30, 511)]:
        row_tile, local = divmod(row, 16)
        k_tile, inner = divmod(column, TILE_K)
        word, bit = divmod(inner, 32)
        lane = (local % 8) * 4 + word % 4
        part = word // 4 * 2 + local // 8  # x, y, z, w
        stored = (int(tiles[row_tile, k_tile, plane, lane * 4 + part]) >> bit) & 1
        assert stored == int(bits[plane, row, column]), (plane, row, column)


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_scale_tiles_follow_the_drawing(scale_bits: int) -> None:
    weight = random_weight(2, 40, 700, 128, offset=True, scale_bits=scale_bits)
    tiles, stored = weight.tiled(), weight.stored
    assert (tiles.scale_bits, tiles.entries, tiles.weight_bits) == (scale_bits, 3, 2)
    assert stored.offset is not None
    offset = stored.offset.view(stored.scales.dtype)  # int8 codes as the bytes that hold them
    for row, group in [(0, 0), (1, 3), (9, 5), (22, 2), (39, 4)]:
        row_tile, local = divmod(row, 16)
        for entry in range(2):
            assert tiles.scale_tiles[row_tile, group, local % 8, entry, local // 8] == stored.scales[entry, row, group]
        assert tiles.scale_tiles[row_tile, group, local % 8, 2, local // 8] == offset[row, group]
        if scale_bits == 8:
            assert tiles.factor_tiles is not None
            assert stored.scale_factors is not None
            assert tiles.factor_tiles[row_tile, local % 8, local // 8] == stored.scale_factors[row, 0]


def test_look_ups_of_a_warp_hit_every_bank_once() -> None:
    """In step s of bcq_lut_gemv lane 4 g + t looks up sub-vector j = s ^ g of its eight; the bank is the sub-vector."""
    weight = random_weight(1, 16, 256, 128, offset=False)
    words = weight.tiled().tiles[0, 0, 0].view(32, 2, 2).to(torch.int64)  # [lane, word t or t + 4, row g or g + 8]
    keys = weight.stored.signs[0].to(torch.int64)  # [row, sub-vector]
    lanes = torch.arange(32)
    t, g = lanes % 4, lanes // 4
    for step in range(8):
        j = step ^ g
        sub_vectors = j // 4 * 16 + t * 4 + j % 4
        assert sorted(sub_vectors.tolist()) == list(range(32))
        for half in range(2):
            looked_up = (words[lanes, j // 4, half] >> (j % 4 * 8)) & 0xFF
            assert torch.equal(looked_up, keys[g + half * 8, sub_vectors])


def _planes(x: Tensor) -> tuple[Tensor, float]:
    """[16, segment] planes and the scale of one segment, as kernels/bcq/planes.cuh defines them."""
    exponent = int(torch.frexp(x.abs().max()).exponent) - 1
    scale = 2.0 ** (exponent - 14)
    codes = torch.round(x / scale).to(torch.int64) & 0xFFFF
    return torch.stack([(codes >> p) & 1 for p in range(PLANES)]), scale


def _fragment_gemv(weight: BcqWeight, x: Tensor, segment: int) -> Tensor:
    """The binary tensor-core product in plain integers, straight from the tiles: what each lane of a warp computes."""
    tiles, scale_tiles = weight.tiled().tiles, weight.tiled().scale_tiles
    n_tiles, k_tiles = tile_counts(weight.out_features, weight.in_features)
    padded = torch.zeros(k_tiles * TILE_K, dtype=torch.float64)
    padded[: weight.in_features] = x
    bits, entries = tiles.shape[2], scale_tiles.shape[3]
    width = group_width(weight.group_size, weight.in_features)
    y = torch.zeros(n_tiles * 16, dtype=torch.float64)
    words = tiles.to(torch.int64) & 0xFFFFFFFF
    for start in range(0, k_tiles * TILE_K, segment):
        part = padded[start : start + segment]
        if not part.any():
            continue
        planes, scale = _planes(part)
        signed = torch.tensor([2.0**p for p in range(15)] + [-(2.0**15)], dtype=torch.float64)
        group = min(start // width, scale_tiles.shape[1] - 1)
        for row in range(n_tiles * 16):
            local, row_tile = row % 16, row // 16
            lanes = [(local % 8) * 4 + word % 4 for word in range(8)]
            for entry in range(entries):
                a = float(scale_tiles[row_tile, group, local % 8, entry, local // 8])
                codes_sum = float((planes.double().sum(1) * signed).sum())
                if entry == bits:
                    y[row] += a * scale * codes_sum
                    continue
                tile = words[row_tile, start // TILE_K, entry]
                row_bits = torch.cat(
                    [(tile[lanes[w] * 4 + w // 4 * 2 + local // 8] >> torch.arange(32)) & 1 for w in range(8)]
                )[start % TILE_K : start % TILE_K + segment]
                counts = (planes & row_bits).sum(1).double()
                y[row] += a * scale * float(2 * (counts * signed).sum() - codes_sum)
    return y[: weight.out_features]


@pytest.mark.parametrize(
    ("n", "k", "group_size", "segment"),
    [(18, 576, 128, 128), (16, 320, 32, 32), (16, 300, -1, 256), (16, 400, 192, 64)],
    ids=["short-last-group", "g32", "row-wise", "g192"],
)
def test_plane_counts_from_tiles_give_the_product(n: int, k: int, group_size: int, segment: int) -> None:
    weight = random_weight(2, n, k, group_size, offset=True)
    x = torch.randn(k).half().double()
    expected = weight.dequantized() @ x
    got = _fragment_gemv(weight, x, segment)
    assert (got - expected).norm() <= FIXED_POINT_RTOL * expected.norm()
