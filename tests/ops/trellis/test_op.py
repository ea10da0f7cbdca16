from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.planes import unpack_signs
from quantkit.formats.trellis import BLOCK_ROWS, TrellisTensors, dequantize_stored, filter_rows
from quantkit.ops.registry import OPS
from quantkit.ops.trellis import op
from quantkit.ops.trellis.layout import TrellisTiles, plane_scale, restore_planes
from quantkit.ops.trellis.op import (
    dequantize_planes,
    filter_sums,
    trellis_linear,
    trellis_linear_prepared,
    trellis_linear_reference,
)
from tests.ops.trellis.problem import FILTERS, SHAPES, stored_weight, tiles_of

FP32_RTOL = 1e-5  # sums of up to 16 terms in another order


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_planes_come_back_from_the_order_of_the_kernels(n: int, k: int) -> None:
    stored = stored_weight(n, k, 3, 5)
    assert torch.equal(restore_planes(tiles_of(stored, k)).signs, stored.signs)


@pytest.mark.parametrize(("bits", "taps"), FILTERS)
def test_filtering_the_sums_of_planes_is_multiplying_the_weight(bits: int, taps: int) -> None:
    """The two ways of a GPU to y, in float64: of K products with signs by planes, and of the expanded weight."""
    n, k = BLOCK_ROWS + 48, 72
    stored, x = stored_weight(n, k, bits, taps), torch.randn(5, k, dtype=torch.float64)
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
    stored, x, bias = stored_weight(208, 100, 2, 6), torch.randn(2, 3, 100), torch.randn(208)
    expected = trellis_linear_reference(x, stored, bias)
    assert torch.equal(trellis_linear(x, stored.signs, stored.scales, stored.filter, bias), expected)
    tiles = tiles_of(stored, 100)
    held = tiles.planes.tiles, tiles.planes.scale_tiles, stored.scales, stored.filter
    assert torch.equal(trellis_linear_prepared(x, *held, bias), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_bias_of_another_type_is_not_read_early(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding is a kernel that may still run when the filter starts, although all weights are ready."""
    stored, told = stored_weight(48, 100, 2, 4), []

    def record(sums: Tensor, weight: TrellisTiles, bias: Tensor, *, weights_ready: bool) -> Tensor:
        told.append((bias.dtype, weights_ready))
        return sums[:, :48]

    monkeypatch.setattr(op, "filter_sums", record)
    tiles, bias = tiles_of(stored, 100), torch.randn(48).half()
    held = tiles.planes.tiles, tiles.planes.scale_tiles, stored.scales, stored.filter
    OPS["trellis_linear_prepared"].cuda(op.TrellisLinearPrepared(torch.randn(1, 100).to(dtype), *held, bias, True))
    assert told == [(dtype, dtype == bias.dtype)]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize(("bits", "taps"), FILTERS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_weight_is_expanded_exactly(n: int, k: int, bits: int, taps: int) -> None:
    stored = stored_weight(n, k, bits, taps, "cuda")
    tiles, expected = tiles_of(stored, k), dequantize_stored(stored, k)
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
    stored, bias = stored_weight(n, 64, bits, taps, "cuda"), torch.randn(n).to("cuda", dtype)
    tiles = tiles_of(stored, 64)
    sums = torch.randn(tokens, bits * n).to("cuda", dtype)
    for ready in (False, True):
        y = filter_sums(sums, tiles, bias, weights_ready=ready)
        expected = _filtered(sums, stored) / tiles.unit * stored.scales[:, 0].float() + bias.float()
        torch.testing.assert_close(y.float(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=1e-3)


def _filtered(sums: Tensor, stored: TrellisTensors) -> Tensor:
    planes = sums.float().t().unflatten(0, (len(stored.filter), -1))  # [q, N, M]
    return filter_rows(planes, stored.filter).t()
