"""The bipolar kernels against the reference twin: every path, tile, width pair and odd shape, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.cuda.device import gpu_of
from quantkit.formats.bipolar import (
    ActCoding,
    check_exact,
    codes_to_values,
    largest_scale,
    largest_value,
    quantize_activations,
)
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.instances import WgmmaTile, binary_pairs, codings, wgmma_tiles
from quantkit.ops.bipolar.launch import expand, gemv_launch, mma_launch, quantize_tiles, wgmma_launch
from quantkit.ops.bipolar.layout import plane_row_sums, tile_lines, tile_weight, untile_lines, untile_weight
from quantkit.ops.bipolar.op import bipolar_prepared_linear
from quantkit.ops.bipolar.plan import GEMV_LIMIT
from quantkit.ops.bipolar.product import Weight
from quantkit.ops.bipolar.weight import tiled_weight
from tests.ops.bipolar.problem import Problem, hopper_only, lines_of

PAIRS = [(p, q) for p in range(1, 9) for q in range(1, 9)]
SHAPES = [(1, 5, 40), (7, 65, 1030), (65, 130, 264), (130, 257, 2050), (300, 520, 4096)]
TILES = [tile for p, q in binary_pairs() for tile in wgmma_tiles(p, q, False)] + wgmma_tiles(1, 1, True)
CUDA = torch.device("cuda")
SANITIZED = pytest.mark.sanitize
WARP_PAIRS = [
    pytest.param(p, q, marks=SANITIZED if (p, q) in ((1, 1), (2, 3)) else (), id=f"w{p}a{q}") for p, q in binary_pairs()
]
DTYPES = [pytest.param(torch.float16, marks=SANITIZED), torch.bfloat16, torch.float32]
QUANTIZED_LENGTHS = [pytest.param(40, marks=SANITIZED), pytest.param(1030, marks=SANITIZED), 4096, 20000]
FLOAT32_INTEGERS = 1 << 24
CODED = [(p, coded) for p in range(1, 9) for coded in codings(p)]
CODED_IDS = [f"w{p}{'-coded' * coded}" for p, coded in CODED]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", QUANTIZED_LENGTHS, ids="K{}".format)
@pytest.mark.parametrize("act_bits", [1, 3, 8], ids="a{}".format)
def test_quantizer_gives_the_reference_codes(act_bits: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(65, k).to(dtype)
    x[3] = 0
    clip = torch.tensor([0.6])
    codes, step = quantize_activations(x, clip, act_bits, True)
    acts = quantize_tiles(x.cuda(), clip.cuda(), ActCoding(act_bits), as_bytes=False)
    planes = pack_codes(codes, act_bits)
    assert torch.equal(untile_lines(acts.tiles, 65, planes.shape[2]).cpu(), planes)
    assert torch.equal(acts.sums.cpu(), codes.sum(1, dtype=torch.int32))
    assert torch.equal(acts.steps.cpu(), step[:, 0])
    as_bytes = quantize_tiles(x.cuda(), clip.cuda(), ActCoding(act_bits), as_bytes=True)
    assert torch.equal(lines_of(as_bytes.tiles, 65, as_bytes=True)[0, :, :k], codes)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("weight_bits", range(1, 9), ids="w{}".format)
def test_expansion_gives_the_codes(weight_bits: int) -> None:
    codes = torch.randint(0, 1 << weight_bits, (70, 1300), dtype=torch.uint8)
    tiles = tile_lines(pack_codes(codes, weight_bits).cuda())
    expanded = expand(Weight(tiles, torch.empty(0), torch.empty(0)), 1300).tiles
    assert torch.equal(lines_of(expanded, 70, as_bytes=True)[0, :, :1300], codes)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("weight_bits", range(1, 7), ids="w{}".format)
def test_expansion_multiplies_by_scale_codes(weight_bits: int) -> None:
    """Bytes of values times scales, plus 128, in the order of a weight's rows; row sums are theirs."""
    codes = torch.randint(0, 1 << weight_bits, (70, 1300), dtype=torch.uint8)
    scales = torch.randint(0, largest_scale(weight_bits) + 1, (70, 11), dtype=torch.uint8)
    stored = pack_codes(codes, weight_bits).cuda(), scales.cuda(), torch.ones(70, 1).half().cuda()
    weight = tiled_weight(*stored, 128, 1300)
    lines = untile_weight(expand(weight, 1300).tiles, 70, 11 * 128).cpu()[0]
    found = lines.unflatten(-1, (-1, 8, 16)).transpose(-1, -2).flatten(-3)[:, :1300]  # column 8 b + c of chunk c
    expected = codes_to_values(codes, weight_bits) * scales.repeat_interleave(128, 1)[:, :1300] + 128
    assert torch.equal(found.short(), expected)
    assert torch.equal(weight.row_sums.cpu(), expected.sum(1, dtype=torch.int32))


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES[:4], ids=[f"{m}x{n}x{k}" for m, n, k in SHAPES[:4]])
@pytest.mark.parametrize(("weight_bits", "act_bits"), PAIRS, ids=[f"w{p}a{q}" for p, q in PAIRS])
def test_op_equals_the_reference(weight_bits: int, act_bits: int, shape: tuple[int, int, int]) -> None:
    check_exact(weight_bits, act_bits, shape[2])
    problem = Problem(shape, weight_bits, act_bits, torch.float32)
    assert torch.equal(problem.run_op().cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [*SHAPES[:4], (1100, 70, 1160)], ids=str)
@pytest.mark.parametrize("act_bits", [1, 4, 8], ids="a{}".format)
@pytest.mark.parametrize("weight_bits", range(1, 7), ids="w{}".format)
def test_op_with_scale_codes_equals_the_reference(weight_bits: int, act_bits: int, shape: tuple[int, int, int]) -> None:
    """One token, few, and so many that bytes are expanded in memory."""
    check_exact(weight_bits, act_bits, shape[2], act_zero=True, coded=True)
    rotated = shape[2] % 8 == 0
    problem = Problem(shape, weight_bits, act_bits, torch.float32, zero=True, rotated=rotated, coded=True)
    assert torch.equal(problem.run_op().cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero"])
@pytest.mark.parametrize("weight_bits", [1, 4, 6], ids="w{}".format)
def test_products_of_bytes_take_scale_codes(weight_bits: int, zero: bool) -> None:
    hopper_only()
    for shape in SHAPES:
        problem = Problem(shape, weight_bits, 8, torch.float16, zero=zero, coded=True)
        product, expected = problem.product(True), problem.expected()
        mma_launch(product, as_bytes=True).run()
        assert torch.equal(product.y.cpu(), expected), f"{shape=}"
        for tile in wgmma_tiles(1, 1, True):
            other = replace(product, y=problem.output())
            wgmma_launch(other, tile, gpu_of(CUDA).processors).run()
            assert torch.equal(other.y.cpu(), expected), f"{shape=} {tile=}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_wgmma_tile_equals_the_reference(tile: WgmmaTile, dtype: torch.dtype) -> None:
    hopper_only()
    bits = (5, 7) if tile.as_bytes else (tile.planes_w, tile.planes_x)
    for shape in SHAPES:
        problem = Problem(shape, *bits, dtype)
        product = problem.product(tile.as_bytes)
        wgmma_launch(product, tile, gpu_of(CUDA).processors).run()
        assert torch.equal(product.y.cpu(), problem.expected()), f"{shape=}"


@pytest.mark.cuda
@pytest.mark.parametrize("k", [1000, 2100, 4100], ids="K{}".format)
@pytest.mark.parametrize("widths", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (5, 7)], ids=str)
def test_blocks_of_several_tiles_equal_the_warp_products(widths: tuple[int, int], k: int) -> None:
    """Four rounds of the largest tile on 132 multiprocessors, with one, three and five k tiles of bits each."""
    hopper_only()
    problem, as_bytes = Problem((3000, 6104, k), *widths, torch.float16), widths == (5, 7)
    product = problem.product(as_bytes)
    mma_launch(product, as_bytes=as_bytes).run()
    for tile in wgmma_tiles(*((1, 1) if as_bytes else widths), as_bytes):
        for _ in range(3):
            other = replace(product, y=problem.output())
            wgmma_launch(other, tile, gpu_of(CUDA).processors).run()
            assert torch.equal(other.y, product.y), f"{tile=}"


@pytest.mark.cuda
@pytest.mark.parametrize("as_bytes", [False, True], ids=["bits", "bytes"])
@pytest.mark.parametrize(("weight_bits", "act_bits"), WARP_PAIRS)
def test_warp_products_equal_the_reference(weight_bits: int, act_bits: int, as_bytes: bool) -> None:
    for shape in SHAPES:
        problem = Problem(shape, weight_bits, act_bits, torch.float16)
        product = problem.product(as_bytes)
        mma_launch(product, as_bytes=as_bytes).run()
        assert torch.equal(product.y.cpu(), problem.expected()), f"{shape=}"


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("act_bits", [1, 3, 8], ids="a{}".format)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33], ids="M{}".format)
@pytest.mark.parametrize(("weight_bits", "coded"), CODED, ids=CODED_IDS)
def test_gemv_equals_the_reference(weight_bits: int, coded: bool, tokens: int, act_bits: int) -> None:
    zero = tokens % 2 == 1
    problem = Problem((tokens, 77, 2050), weight_bits, act_bits, torch.bfloat16, zero=zero, coded=coded)
    product, expected = problem.product(False), problem.expected()
    for _ in range(2):
        product.y.fill_(float("nan"))
        gemv_launch(product).run()
        assert torch.equal(product.y.cpu(), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, GEMV_LIMIT, 200, 300], ids="M{}".format)
@pytest.mark.parametrize(
    ("weight_bits", "act_bits", "coded"),
    [(2, 2, False), (1, 2, False), (4, 8, False), (8, 8, False), (4, 8, True)],
    ids=["w2a2", "w1a2", "w4a8", "w8a8", "w4a8-coded"],
)
def test_two_runs_and_a_graph_give_the_same_bits(weight_bits: int, act_bits: int, coded: bool, tokens: int) -> None:
    problem = Problem((tokens, 520, 4096), weight_bits, act_bits, torch.float16, coded=coded)
    weight = problem.weight()
    x, clip, bias = problem.x.cuda(), problem.clip.cuda(), problem.bias.cuda()
    coding = act_bits, True, False, False, weight.scale_tiles
    given = x, weight.tiles, weight.row_sums, weight.scales, clip, bias, *coding
    first, second = (bipolar_prepared_linear(*given) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bipolar_prepared_linear(*given)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    assert torch.equal(first, captured)


@pytest.mark.parametrize(("weight_bits", "act_bits"), PAIRS, ids=[f"w{p}a{q}" for p, q in PAIRS])
def test_the_op_is_the_integer_product_while_fp32_holds_it(
    weight_bits: int, act_bits: int, device: torch.device
) -> None:
    """With every scale 1 the op returns the integers: exact in fp32 up to 2**24, so K c_x c_w stays below that."""
    c_x, c_w = largest_value(act_bits), largest_value(weight_bits)
    k = min(1030, FLOAT32_INTEGERS // (c_x * c_w))
    x_codes = torch.randint(0, c_x + 1, (65, k), dtype=torch.uint8)
    w_codes = torch.randint(0, c_w + 1, (70, k), dtype=torch.uint8)
    x, w = codes_to_values(x_codes, act_bits).long(), codes_to_values(w_codes, weight_bits).long()
    planes = pack_codes(w_codes, weight_bits)
    weight = (tile_weight(planes), plane_row_sums(planes, k), torch.ones(70, 1, dtype=torch.float16))
    clip = torch.tensor([float(c_x)])  # per tensor: a step of 1
    given = (x.float(), *weight, clip)
    y = bipolar_prepared_linear(*(tensor.to(device) for tensor in given), None, act_bits, False)
    assert torch.equal(y.long().cpu(), x @ w.T)
