"""The activation quantizer against nearest_codes where rounding, range or memory is at an edge, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quantkit.formats.bipolar import ActCoding, nearest_codes, quantize_activations, quantize_with_zero
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.launch import quantize_tiles
from tests.ops.bipolar.problem import lines_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHORT_DTYPES = DTYPES[:2]
WIDTHS = [1, 2, 3, 5, 8]
ALL_ONES = 2 - 2**-23
"""The significand at which inverses are hardest to round."""

CLIPS = [1.0, 0.37, ALL_ONES, 8 * ALL_ONES, 3.0, 255.0, 1.5 * 2**-24, 2**-20 * ALL_ONES, 1e-42, 1e-30, 1e30, 3e38]
"""Ends of the range per tensor: plain, ties at integers, and steps behind which quotients under- or overflow."""


def check(x: Tensor, clip: float, coding: ActCoding) -> None:
    """Raise AssertionError where the kernel does not give the reference's codes, sums, steps and zero points.

    A quotient that is NaN has no code of the reference's; the kernel's must be 0.
    """
    act_clip = torch.tensor([clip])
    if coding.zero:
        codes, step, zero = quantize_with_zero(x, act_clip, coding.bits)
    else:
        (codes, step), zero = quantize_activations(x, act_clip, coding.bits, coding.per_token), None
    codes[(x.float() / torch.where(step > 0, step, 1.0)).isnan()] = 0
    for as_bytes in (False, True):
        made = quantize_tiles(x.cuda(), act_clip.cuda(), coding, as_bytes=as_bytes)
        lines = codes[None] if as_bytes else pack_codes(codes, coding.bits)
        stored = lines_of(made.tiles, x.shape[0], as_bytes=as_bytes)
        told = f"{clip=} {coding=} {as_bytes=}"
        assert torch.equal(stored[..., : lines.shape[2]], lines), told
        assert not stored[..., lines.shape[2] :].any(), told
        sums = made.sums.cpu().view(-1, x.shape[0])
        assert torch.equal(sums[0], codes.sum(1, dtype=torch.int32)), told
        assert zero is None or torch.equal(sums[1], 2 * zero[:, 0]), told
        torch.testing.assert_close(made.steps.cpu(), step[:, 0], rtol=0, atol=0, equal_nan=True, msg=told)


def every_value(dtype: torch.dtype) -> Tensor:
    """All 2**16 values of a 16-bit type, NaN and Inf too: [1, 65536]."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)[None]


def hard_rows(dtype: torch.dtype, columns: int) -> Iterator[Tensor]:
    """Rows [M, columns] as models do and do not produce them: ties, zeros of both signs, Inf, NaN, tiny, huge."""
    noise = torch.randn(8, columns).to(dtype)
    yield noise.relu()
    rows = torch.zeros(8, columns, dtype=dtype)
    rows[1] = -rows[1]
    rows[2, columns // 2] = 1.0
    rows[3] = noise[3] * torch.finfo(dtype).smallest_normal  # mostly below the normal range
    rows[4] = noise[4].clamp(-1, 1) * torch.finfo(dtype).max
    rows[5] = torch.arange(columns).sub(columns // 2).to(dtype)  # ties with a step that divides an integer
    rows[6] = noise[6]
    rows[6, columns // 3] = torch.finfo(dtype).tiny
    rows[7] = torch.finfo(dtype).eps * noise[7].sign()
    yield rows
    wild = noise.clone()
    wild[0, 3], wild[1, columns - 1], wild[2, 5], wild[3, 0] = float("inf"), -float("inf"), float("nan"), -0.0
    wild[4, 1], wild[4, 2] = float("nan"), float("inf")
    yield wild


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", SHORT_DTYPES, ids=str)
@pytest.mark.parametrize("act_bits", WIDTHS, ids="a{}".format)
def test_every_value_over_hard_steps(act_bits: int, dtype: torch.dtype) -> None:
    """Each value in an even and in an odd column. With Inf in a row the kernel divides; without, it multiplies."""
    values = every_value(dtype)
    finite = values[values.isfinite()][None]
    for clip in CLIPS:
        check(finite, clip, ActCoding(act_bits, False))
        check(finite.roll(1, dims=1), clip, ActCoding(act_bits, False))
    check(values, CLIPS[1], ActCoding(act_bits, False))
    for zero in (False, True):
        check(finite, CLIPS[1], ActCoding(act_bits, True, zero))
        check(finite[finite.abs() < 8][None], CLIPS[1], ActCoding(act_bits, True, zero))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [40, 1030, 2048], ids="K{}".format)
@pytest.mark.parametrize("act_bits", WIDTHS, ids="a{}".format)
def test_hard_rows(act_bits: int, columns: int, dtype: torch.dtype) -> None:
    for rows in hard_rows(dtype, columns):
        for per_token in (True, False):
            check(rows, 0.7, ActCoding(act_bits, per_token))
        check(rows, 1.0, ActCoding(act_bits, True))
        bounded_below = rows.masked_fill(rows == -float("inf"), float("inf"))  # else the reference has no zero point
        for clip in (0.7, 1.0):
            check(bounded_below, clip, ActCoding(act_bits, True, True))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_begin_anywhere(dtype: torch.dtype) -> None:
    """K a multiple of 8, but x not at a multiple of 16 bytes."""
    flat = torch.randn(3 * 1096 + 1).to(dtype).cuda()
    x = flat[1:].view(3, 1096)
    made = quantize_tiles(x, torch.ones(1).cuda(), ActCoding(3), as_bytes=False)
    codes, _ = quantize_activations(x.cpu(), torch.ones(1), 3, True)
    assert torch.equal(lines_of(made.tiles, 3, as_bytes=False)[..., :137], pack_codes(codes, 3))


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32, rounded once: the sum in fp64 rounded to odd, so that rounding it to fp32 decides no tie."""
    product, addend = a.double() * b.double(), c.double().expand_as(a)
    total = product + addend
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    inward = bits - ((lost != 0) & (lost.sign() != total.sign())).long()
    return torch.where(lost != 0, inward | 1, bits).view(torch.float64).float()


@pytest.mark.parametrize("limit_bits", range(1, 9), ids="a{}".format)
def test_the_shorter_arithmetic_of_the_kernel_gives_the_codes(limit_bits: int) -> None:
    """A division by two fused steps and one addition with directed rounding, exact in fp64 before it rounds."""
    limit = float((1 << limit_bits) - 1)
    values = (torch.arange(-2047, 2048).float() * 2.0 ** torch.arange(-34, 3).float()[:, None]).flatten()
    steps = torch.tensor([ALL_ONES, 1.0, 1 + 2**-23, 4 / 3, 1.7320508])[:, None]
    x, step = (each.contiguous() for each in torch.broadcast_tensors(values, steps))
    inverse = 1 / step
    guess = x * inverse
    quotient = fused(fused(-guess, step, x), inverse, guess)
    assert torch.equal(quotient, x / step)
    u = (quotient + limit).clamp(0, 2 * limit).double()
    more = 2.0**-24 if limit == 1 else 0.0
    up = ((u * (0.5 + more) + 0.5) * 256).floor() / 256
    down = ((u * 0.5 + 0.5 - 2.0**-8) * 256).ceil() / 256
    codes = torch.where(torch.arange(x.shape[1]) % 2 == 0, up.floor(), down.floor())
    assert torch.equal(codes.to(torch.uint8), nearest_codes(x, step, limit_bits))


def test_two_corrections_give_the_quotient_of_any_two_significands() -> None:
    """What fp32 inputs and rotated ones take: random significands, the hardest divisors, and quotients near ties."""
    count = 1 << 20
    numerator, divisor, quotient = (1 + torch.randint(0, 1 << 23, (count,)).float() * 2.0**-23 for _ in range(3))
    short = torch.randint(1 << 12, 1 << 13, (count,)).float()
    near_ties = ((quotient.double() + 2.0**-24) * short.double()).float()
    hardest = ALL_ONES - torch.arange(count).remainder(64) * 2.0**-23
    for x, step in ((numerator, divisor), (near_ties, short), (numerator, hardest), (-numerator, hardest)):
        inverse = 1 / step
        found = x * inverse
        for _ in range(2):
            found = fused(fused(-found, step, x), inverse, found)
        assert torch.equal(found, x / step)
