"""Rotated inputs and zero points: the kernel against the reference; on the CPU, its order of work and its rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.device import gpu_of
from quantkit.formats.bipolar import ActCoding, largest_value, quantize_activations, quantize_with_zero
from quantkit.formats.hadamard import SIGN_WORDS, block_width, inverse_root, rotate
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.instances import WgmmaTile, binary_pairs, wgmma_tiles
from quantkit.ops.bipolar.launch import gemv_launch, mma_launch, quantize_tiles, wgmma_launch
from tests.ops.bipolar.problem import Problem, hopper_only, lines_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
CODINGS = [
    pytest.param(zero, rotated, id=f"{'zero' if zero else 'symmetric'}-{'rotated' if rotated else 'plain'}")
    for zero, rotated in ((True, False), (False, True), (True, True))
]
ZERO_TILES = [tile for p, q in binary_pairs() for tile in wgmma_tiles(p, q, False)] + wgmma_tiles(1, 1, True)
CUDA = torch.device("cuda")
LANES, RUN = 32, 8


def reference(x: Tensor, clip: Tensor, coding: ActCoding) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [M, K], steps [M] and what the second row of sums holds [M]."""
    x = rotate(x) if coding.rotated else x
    if coding.zero:
        codes, step, zero = quantize_with_zero(x, clip, coding.bits)
        return codes, step[:, 0], 2 * zero[:, 0]
    codes, step = quantize_activations(x, clip, coding.bits, coding.per_token)
    return codes, step[:, 0], torch.zeros(len(x), dtype=torch.int32)


def rows_of(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows as models make them: of one sign, with an outlier, all zero, tiny and huge."""
    x = torch.randn(65, columns).to(dtype)
    x[1], x[2] = x[1].relu(), -x[2].relu()
    x[3] = 0
    x[4, columns // 2] = 900.0
    x[5] = x[5] * torch.finfo(dtype).smallest_normal
    x[6] = x[6].clamp(-1, 1) * 3e4
    return x


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [40, 576, 1408, 4096, 20480], ids="K{}".format)
@pytest.mark.parametrize("bits", [1, 4, 5, 8], ids="a{}".format)
@pytest.mark.parametrize(("zero", "rotated"), CODINGS)
def test_the_kernel_gives_the_reference_codes(
    bits: int, columns: int, dtype: torch.dtype, zero: bool, rotated: bool
) -> None:
    x, clip, coding = rows_of(columns, dtype), torch.tensor([0.9]), ActCoding(bits, True, zero, rotated)
    codes, step, twice_zero = reference(x, clip, coding)
    for as_bytes in (False, True):
        made = quantize_tiles(x.cuda(), clip.cuda(), coding, as_bytes=as_bytes)
        lines = codes[None] if as_bytes else pack_codes(codes, bits)
        stored = lines_of(made.tiles, len(x), as_bytes=as_bytes)
        assert torch.equal(stored[..., : lines.shape[2]], lines)
        assert not stored[..., lines.shape[2] :].any()
        sums = made.sums.cpu().view(-1, len(x))
        assert torch.equal(sums[0], codes.sum(1, dtype=torch.int32))
        assert not zero or torch.equal(sums[1], twice_zero)
        assert torch.equal(made.steps.cpu(), step)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(7, 65, 1032), (130, 257, 2048)], ids=str)
@pytest.mark.parametrize(("zero", "rotated"), CODINGS)
@pytest.mark.parametrize(("weight_bits", "act_bits"), [(1, 2), (2, 2), (4, 4), (4, 8), (8, 8)], ids=str)
def test_the_op_equals_the_reference(
    weight_bits: int, act_bits: int, zero: bool, rotated: bool, shape: tuple[int, int, int]
) -> None:
    problem = Problem(shape, weight_bits, act_bits, torch.float16, zero=zero, rotated=rotated)
    assert torch.equal(problem.run_op().cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("as_bytes", [False, True], ids=["bits", "bytes"])
@pytest.mark.parametrize(("weight_bits", "act_bits"), binary_pairs(), ids=str)
def test_warp_products_with_a_zero_equal_the_reference(weight_bits: int, act_bits: int, as_bytes: bool) -> None:
    problem = Problem((65, 130, 264), weight_bits, act_bits, torch.float16, zero=True)
    product = problem.product(as_bytes)
    mma_launch(product, as_bytes=as_bytes).run()
    assert torch.equal(product.y.cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 5, 33], ids="M{}".format)
@pytest.mark.parametrize("weight_bits", [1, 4, 8], ids="w{}".format)
def test_the_gemv_with_a_zero_equals_the_reference(weight_bits: int, tokens: int) -> None:
    problem = Problem((tokens, 77, 2050), weight_bits, 8, torch.bfloat16, zero=True)
    product = problem.product(False)
    gemv_launch(product).run()
    assert torch.equal(product.y.cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", ZERO_TILES, ids=str)
def test_every_wgmma_tile_with_a_zero_equals_the_reference(tile: WgmmaTile, dtype: torch.dtype) -> None:
    hopper_only()
    bits = (5, 7) if tile.as_bytes else (tile.planes_w, tile.planes_x)
    for shape in ((65, 130, 264), (300, 520, 4096)):
        problem = Problem(shape, *bits, dtype, zero=True)
        product = problem.product(tile.as_bytes)
        wgmma_launch(product, tile, gpu_of(CUDA).processors).run()
        assert torch.equal(product.y.cpu(), problem.expected()), f"{shape=}"


def as_a_warp(x: Tensor) -> Tensor:
    """x Q of runs [M, 256] in the order of the kernel: a lane's eight columns, then between lanes by shuffles."""
    lane = torch.arange(LANES)
    words = torch.tensor(SIGN_WORDS)[lane // 4] >> (lane % 4 * 8)
    signs = 1.0 - 2.0 * (words[:, None] >> torch.arange(RUN) & 1).float()
    v = list((x.float().view(-1, LANES, RUN) * signs).unbind(-1))  # a register per column of a lane
    for distance in (1, 2, 4):
        for i in range(RUN):
            if not i & distance:
                v[i], v[i + distance] = v[i] + v[i + distance], v[i] - v[i + distance]
    for distance in (1, 2, 4, 8, 16):
        if distance < block_width(x.shape[1]) // RUN:
            other = [each[:, lane ^ distance] for each in v]
            upper = (lane & distance) != 0
            v = [torch.where(upper, theirs - own, own + theirs) for own, theirs in zip(v, other, strict=True)]
    return torch.stack(v, -1).flatten(1) * inverse_root(block_width(x.shape[1]))


def test_the_order_of_a_warp_gives_the_bits_of_the_reference() -> None:
    x = torch.randn(50, 256) * torch.logspace(-3, 3, 256)
    assert torch.equal(as_a_warp(x), rotate(x))


@pytest.mark.parametrize("bits", range(1, 9), ids="a{}".format)
def test_the_rounding_of_the_kernel_gives_the_codes(bits: int) -> None:
    """One addition with directed rounding at steps of 2**-8, exact in fp64 before it rounds."""
    limit = float(largest_value(bits))
    x = torch.cat([rows_of(600, torch.float32), torch.arange(-300, 300).float()[None], torch.full((1, 600), -0.25)])
    x[7] = x[1] / x[1].max() * 2 * limit  # steps of 1: ties
    x[8, :9] = torch.tensor([1 - 2**-24, 1 + 2**-23, 3 - 2**-22, 3, 1, 2**-30, -(2**-30), 0, 2 * limit])
    x[8, 9:] = 0
    codes, step, zero = quantize_with_zero(x, torch.ones(1), bits)
    quotient = x / torch.where(step > 0, step, 1.0)
    u = (quotient + 2.0 * zero).clamp(0, 2 * limit).double()
    up = ((u * 0.5 + 0.5) * 256).floor() / 256
    down = ((u * 0.5 + 0.5 - 2.0**-8) * 256).ceil() / 256
    expected = torch.where(torch.arange(x.shape[1]) % 2 == 0, up.floor(), down.floor())
    assert torch.equal(codes.to(torch.float64), expected)
