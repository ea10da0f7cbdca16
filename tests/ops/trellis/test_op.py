from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.planes import pack_bits, unpack_signs
from quantkit.formats.trellis import BLOCK_ROWS, TrellisTensors, dequantize_stored, filter_rows
from quantkit.ops.registry import OPS
from quantkit.ops.trellis import op
from quantkit.ops.trellis.layout import TrellisTiles, plane_scale, prepare_planes, restore_planes
from quantkit.ops.trellis.op import (
    MOST_PLANES,
    dequantize_planes,
    filter_sums,
    trellis_linear,
    trellis_linear_prepared,
    trellis_linear_reference,
)

SHAPES = ((48, 100), (208, 520), (576, 1000), (112, 333))  # N, K: rings of 48, 16 and 64 rows; odd tiles, an odd K
FILTERS = ((2, 6), (3, 5), (4, 4), (1, 8), (6, 2))
FP32_RTOL = 1e-5  # sums of up to 16 terms in another order
# Of the largest |y|: the planes' sums and y are rounded to x's type, and K terms are added in another order.
ATOL = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}


def _stored(n: int, k: int, bits: int, taps: int, device: str = "cpu") -> TrellisTensors:
    signs = pack_bits(torch.randint(0, 2, (bits, n, k)))
    scales, filter = (torch.rand(n, 1) * 0.02 + 0.01).half(), torch.randn(bits, taps) * 0.3
    return TrellisTensors(signs.to(device), scales.to(device), filter.to(device))


def _tiles(stored: TrellisTensors, k: int) -> TrellisTiles:
    return TrellisTiles(prepare_planes(stored, k), stored.scales, stored.filter)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_planes_come_back_from_the_order_of_the_kernels(n: int, k: int) -> None:
    stored = _stored(n, k, 3, 5)
    assert torch.equal(restore_planes(_tiles(stored, k)).signs, stored.signs)


@pytest.mark.parametrize(("bits", "taps"), FILTERS)
def test_filtering_the_sums_of_planes_is_multiplying_the_weight(bits: int, taps: int) -> None:
    """The two ways of a GPU to y, in float64: of K products with signs by planes, and of the expanded weight."""
    n, k = BLOCK_ROWS + 48, 72
    stored, x = _stored(n, k, bits, taps), torch.randn(5, k, dtype=torch.float64)
    sums = unpack_signs(stored.signs, k).double() @ x.t()  # [bits, N, M]
    y = torch.zeros(n, 5, dtype=torch.float64)
    for row in range(n):
        first, ring = (0, BLOCK_ROWS) if row < BLOCK_ROWS else (BLOCK_ROWS, 48)
        for d in range(taps):
            for i in range(bits):
                y[row] += stored.filter[i, d].double() * sums[i, first + (row - first - d) % ring]
    expected = x @ dequantize_stored(stored, k).double().t()
    torch.testing.assert_close((y * stored.scales.double()).t(), expected, rtol=FP32_RTOL, atol=1e-6)


def test_the_plane_scale_is_an_exact_power_of_two_of_fp16() -> None:
    for k in (8, 100, 4096, 28672, 1 << 20):
        scale = plane_scale(k)
        assert torch.tensor(scale).half().item() == scale
        assert 0.7 <= scale * k**0.5 <= 1.42


def test_the_ops_of_a_cpu_are_the_reference() -> None:
    stored, x, bias = _stored(208, 100, 2, 6), torch.randn(2, 3, 100), torch.randn(208)
    expected = trellis_linear_reference(x, stored, bias)
    assert torch.equal(trellis_linear(x, stored.signs, stored.scales, stored.filter, bias), expected)
    tiles = _tiles(stored, 100)
    held = tiles.planes.tiles, tiles.planes.scale_tiles, stored.scales, stored.filter
    assert torch.equal(trellis_linear_prepared(x, *held, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_of_another_type_is_not_read_early(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding is a kernel that may still run when the filter starts, although all weights are ready."""
    stored, told = _stored(48, 100, 2, 4), []

    def record(sums: Tensor, weight: TrellisTiles, bias: Tensor, *, weights_ready: bool) -> Tensor:
        told.append((bias.dtype, weights_ready))
        return sums[:, :48]

    monkeypatch.setattr(op, "filter_sums", record)
    tiles, bias = _tiles(stored, 100), torch.randn(48).half()
    held = tiles.planes.tiles, tiles.planes.scale_tiles, stored.scales, stored.filter
    OPS["trellis_linear_prepared"].cuda(op.TrellisLinearPrepared(torch.randn(1, 100).to(dtype), *held, bias, True))
    assert told == [(dtype, dtype == bias.dtype)]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize(("bits", "taps"), FILTERS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_weight_is_expanded_exactly(n: int, k: int, bits: int, taps: int) -> None:
    stored = _stored(n, k, bits, taps, "cuda")
    tiles, expected = _tiles(stored, k), dequantize_stored(stored, k)
    found = dequantize_planes(tiles, torch.float32)
    torch.testing.assert_close(found, expected, rtol=FP32_RTOL, atol=1e-7)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(dequantize_planes(tiles, dtype), found.to(dtype))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("bits", "taps"), FILTERS)
def test_sums_are_filtered_to_the_rounding_of_y(bits: int, taps: int, dtype: torch.dtype) -> None:
    n, tokens = 304, 3
    stored, bias = _stored(n, 64, bits, taps, "cuda"), torch.randn(n).to("cuda", dtype)
    tiles = _tiles(stored, 64)
    sums = torch.randn(tokens, bits * n).to("cuda", dtype)
    for ready in (False, True):
        y = filter_sums(sums, tiles, bias, weights_ready=ready)
        expected = _filtered(sums, stored) / tiles.unit * stored.scales[:, 0].float() + bias.float()
        torch.testing.assert_close(y.float(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=1e-3)


def _filtered(sums: Tensor, stored: TrellisTensors) -> Tensor:
    planes = sums.float().t().unflatten(0, (len(stored.filter), -1))  # [q, N, M]
    return filter_rows(planes, stored.filter).t()


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", list(ATOL))
@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 16, 40, 64, MOST_PLANES // 2, MOST_PLANES + 1])
def test_products_are_right_and_repeat_bit_for_bit(tokens: int, dtype: torch.dtype) -> None:
    for (n, k), (bits, taps) in zip(SHAPES, FILTERS, strict=False):
        stored, x = _stored(n, k, bits, taps, "cuda"), torch.randn(tokens, k).to("cuda", dtype)
        tiles, bias = _tiles(stored, k), torch.randn(n).to("cuda", dtype)
        held = tiles.planes.tiles, tiles.planes.scale_tiles, stored.scales, stored.filter
        torch.cuda.synchronize()
        y, again = (trellis_linear_prepared(x, *held, bias, weights_ready=True) for _ in range(2))
        assert torch.equal(y, again)
        expected = x.double() @ dequantize_stored(stored, k).double().t() + bias.double()
        largest = expected.abs().max().item()
        torch.testing.assert_close(y.double(), expected, rtol=0, atol=ATOL[dtype] * largest)
