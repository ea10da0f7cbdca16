from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.formats.flatten import pack_nibbles
from quantkit.ops.flatten.layout import tile_codes
from quantkit.ops.flatten.op import flatten_quantize, int8_gemm, int8_gemm_tiles

# Channels 0 and 3 have further slices; the last two columns are a weight slice and padding.
CHANNEL = [0, 1, 2, 3, 4, 0, 0, 3, 1, 0]
SEGMENT = [0, 0, 0, 0, 0, 1, 2, 1, 0, 0]
CHANNELS = 5


def _map(device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(CHANNEL, dtype=torch.int32, device=device),
        torch.tensor(SEGMENT, dtype=torch.int32, device=device),
    )


def _naive_codes(x: list[float], steps: list[float], top: int) -> list[int]:
    codes = []
    for channel, segment in zip(CHANNEL, SEGMENT, strict=True):
        q = round(x[channel] / steps[channel])
        size = min(max(abs(q) - top * segment, 0), top)
        codes.append(size if q >= 0 else -size)
    return codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
def test_codes_match_a_naive_loop(device: torch.device, bits: int, dtype: torch.dtype, smooth: bool) -> None:
    # Powers of two as steps: the reciprocal is exact and so is the comparison.
    smooth_scale = torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0])
    x = (torch.randn(2, 7, CHANNELS) * 60).to(dtype)
    act_scale = torch.tensor([0.25])
    codes = flatten_quantize(
        x.to(device), *_map(device), act_scale.to(device), smooth_scale.to(device) if smooth else None, bits
    )
    steps = (act_scale * smooth_scale if smooth else act_scale.expand(CHANNELS)).tolist()
    expected = [_naive_codes(row, steps, 2 ** (bits - 1) - 1) for row in x.float().flatten(0, 1).tolist()]
    assert codes.dtype == torch.int8
    assert codes.flatten(0, 1).tolist() == expected


def test_slices_saturate_and_nan_counts_as_zero(device: torch.device) -> None:
    x = torch.tensor([[float("inf"), float("-inf"), float("nan"), -1e30, 0.0]], device=device)
    codes = flatten_quantize(x, *_map(device), torch.tensor([1.0], device=device), None, 8)
    assert codes.tolist() == [[127, -127, 0, -127, 0, 127, 127, -127, -127, 127]]


def test_negated_input_gives_negated_codes(device: torch.device) -> None:
    x, scale = torch.randn(9, CHANNELS, device=device) * 300, torch.tensor([0.7], device=device)
    codes = flatten_quantize(x, *_map(device), scale, None, 8)
    assert torch.equal(flatten_quantize(-x, *_map(device), scale, None, 8), -codes)


@pytest.mark.parametrize("rows", [1, 7, 65])
@pytest.mark.parametrize("outputs", [1, 5, 40])
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
def test_product_is_exact(device: torch.device, rows: int, outputs: int, bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    acts = torch.randint(-top, top + 1, (rows, 96), dtype=torch.int8)
    codes = torch.randint(-top, top + 1, (outputs, 96), dtype=torch.int8)
    one = torch.ones(1, device=device)
    stored = (pack_nibbles(codes) if bits == 4 else codes).to(device)
    y = int8_gemm(acts.to(device), stored, one, one, None, torch.float32)
    assert torch.equal(y.cpu().long(), acts.long() @ codes.long().t())


def test_largest_sums_do_not_overflow() -> None:
    codes = torch.full((17, 133_120), 127, dtype=torch.int8)
    y = int8_gemm(codes, codes, torch.ones(1), torch.ones(1), None, torch.float64)
    assert y[0, 0].item() == pytest.approx(127 * 127 * 133_120, rel=2**-24)  # the sum is scaled in fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_scale_and_bias_are_applied_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    acts, codes = torch.tensor([[[3, -2] * 16]], dtype=torch.int8), torch.tensor([[1, 1] * 16], dtype=torch.int8)
    y = int8_gemm(
        acts.to(device),
        codes.to(device),
        torch.tensor([0.5], device=device),
        torch.tensor([0.25], device=device),
        torch.tensor([10.0], dtype=dtype, device=device),
        dtype,
    )
    assert (y.dtype, y.tolist()) == (dtype, [[[12.0]]])


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 1), (7, 5), (65, 70)])
def test_a_scale_per_feature_rounds_once_per_operation(
    device: torch.device, rows: int, outputs: int, tiled: bool, bits: int
) -> None:
    top = 2 ** (bits - 1) - 1
    acts = torch.randint(-top, top + 1, (rows, 96), dtype=torch.int8)
    codes = torch.randint(-top, top + 1, (outputs, 96), dtype=torch.int8)
    act_scale, weight_scale, bias = torch.tensor([0.013]), torch.rand(outputs, 1) * 0.02, torch.randn(outputs)
    # fp64 holds every product of two fp32 numbers, and these sums.
    scale = (act_scale.double() * weight_scale.flatten().double()).float().double()
    scaled = ((acts.long() @ codes.long().t()).double() * scale).float().double()
    expected = (scaled + bias.double()).float()
    stored = pack_nibbles(codes) if bits == 4 else codes
    scales = act_scale.to(device), weight_scale.to(device)
    if tiled:
        operands = tile_codes(acts).to(device), tile_codes(stored, weight=True).to(device)
        y = int8_gemm_tiles(*operands, *scales, bias.to(device), rows, outputs, torch.float32)
    else:
        y = int8_gemm(acts.to(device), stored.to(device), *scales, bias.to(device), torch.float32)
    assert y.shape == (rows, outputs)
    assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=["vector", "batch"])
def test_equal_scales_per_feature_are_one_scale(device: torch.device, leading: tuple[int, ...]) -> None:
    acts = torch.randint(-127, 128, (*leading, 64), dtype=torch.int8, device=device)
    codes = torch.randint(-127, 128, (24, 64), dtype=torch.int8, device=device)
    scale, bias = torch.tensor([0.013], device=device), torch.randn(24, device=device)
    one, each = (int8_gemm(acts, codes, scale, own, bias, torch.float16) for own in (scale, scale.expand(24, 1)))
    assert each.shape == (*leading, 24)
    assert torch.equal(one, each)


def test_two_runs_are_equal_bit_for_bit(device: torch.device) -> None:
    acts = torch.randint(-127, 128, (33, 64), dtype=torch.int8, device=device)
    codes = torch.randint(-127, 128, (24, 64), dtype=torch.int8, device=device)
    scale = torch.tensor([0.013], device=device)
    first, second = (int8_gemm(acts, codes, scale, scale, None, torch.float16) for _ in range(2))
    assert torch.equal(first, second)
