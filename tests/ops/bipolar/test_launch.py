"""The bipolar kernels against the reference twin: every path, tile, width pair and odd shape, bit for bit."""

from __future__ import annotations

import re

import pytest
import torch

from quantkit.formats.bipolar import check_exact, codes_to_values, largest_value, quantize_activations
from quantkit.formats.planes import pack_codes
from quantkit.ops.bipolar.instances import WgmmaTile, binary_pairs, wgmma_tiles
from quantkit.ops.bipolar.launch import (
    GEMV_COLUMNS,
    best_tile,
    expand,
    launch_gemv,
    launch_mma,
    launch_wgmma,
    path_for,
    path_table,
    quantize_tiles,
)
from quantkit.ops.bipolar.layout import plane_row_sums, tile_weight, untile_lines, untile_weight
from quantkit.ops.bipolar.op import bipolar_prepared_linear
from tests.ops.bipolar.problem import Problem

PAIRS = [(p, q) for p in range(1, 9) for q in range(1, 9)]
SHAPES = [(1, 5, 40), (7, 65, 1030), (65, 130, 264), (130, 257, 2050), (300, 520, 4096)]
TILES = [tile for p, q in binary_pairs() for tile in wgmma_tiles(p, q, False)] + wgmma_tiles(1, 1, True)
HOPPER = (9, 0)
FLOAT32_INTEGERS = 1 << 24


def _hopper_only() -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("warpgroup products need compute capability 9.0")


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
def test_the_path_table_names_every_pair_once(capability: tuple[int, int]) -> None:
    """What ``quantkit doctor`` prints is what path_for decides."""
    found = {}
    for widths, what, reason in path_table(*capability)[2:]:
        assert reason
        p, first, last = map(int, re.fullmatch(r"W(\d)A(\d)(?:-(\d))?", widths).groups(default=widths[-1]))  # type: ignore[union-attr]
        found.update({(p, q): (what, reason) for q in range(first, last + 1)})
    assert found.keys() == set(PAIRS)
    for pair, (what, _) in found.items():
        path = path_for(*pair, *capability)
        assert what == f"{path.kernel} {'binary' if path.longest else 'INT8'}"


def test_paths_by_widths_columns_and_gpu() -> None:
    assert path_for(2, 4, 9, 0).longest == (1 << 22) // 45
    assert path_for(3, 4, 9, 0).longest == 0
    assert path_for(1, 1, 12, 0).longest == 0
    assert [path_for(1, 1, *gpu).kernel for gpu in [(8, 0), (9, 0), (12, 0)]] == ["mma", "wgmma", "mma"]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_fits_shared_memory_with_two_stages(tile: WgmmaTile) -> None:
    for element_bytes in (2, 4):
        assert tile.stages(element_bytes) >= 2
        assert tile.shared_bytes(element_bytes) <= 232_448


def test_small_problems_take_small_tiles() -> None:
    large = best_tile(1, 1, False, 8192, 8192, 132)
    small = best_tile(1, 1, False, 128, 4096, 132)
    assert small.rows * small.columns < large.rows * large.columns


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [40, 1030, 4096, 20000], ids="K{}".format)
@pytest.mark.parametrize("act_bits", [1, 3, 8], ids="a{}".format)
def test_quantizer_gives_the_reference_codes(act_bits: int, columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(65, columns).to(dtype)
    x[3] = 0
    clip = torch.tensor([0.6])
    codes, step = quantize_activations(x, clip, act_bits, True)
    acts = quantize_tiles(x.cuda(), clip.cuda(), act_bits, per_token=True, as_bytes=False)
    planes = pack_codes(codes, act_bits)
    assert torch.equal(untile_lines(acts.tiles, 65, planes.shape[2]).cpu(), planes)
    assert torch.equal(acts.sums.cpu(), codes.sum(1, dtype=torch.int32))
    assert torch.equal(acts.steps.cpu(), step[:, 0])
    as_bytes = quantize_tiles(x.cuda(), clip.cuda(), act_bits, per_token=True, as_bytes=True)
    assert torch.equal(untile_lines(as_bytes.tiles, 65, columns)[0].cpu(), codes)


@pytest.mark.cuda
@pytest.mark.parametrize("weight_bits", range(1, 9), ids="w{}".format)
def test_expansion_gives_the_codes(weight_bits: int) -> None:
    codes = torch.randint(0, 1 << weight_bits, (70, 1300), dtype=torch.uint8)
    expanded = expand(tile_weight(pack_codes(codes, weight_bits).cuda()), 1300)
    assert torch.equal(untile_weight(expanded, 70, 1300)[0].cpu(), codes)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", SHAPES[:4], ids=[f"{m}x{n}x{k}" for m, n, k in SHAPES[:4]])
@pytest.mark.parametrize(("weight_bits", "act_bits"), PAIRS, ids=[f"w{p}a{q}" for p, q in PAIRS])
def test_op_equals_the_reference(weight_bits: int, act_bits: int, shape: tuple[int, int, int]) -> None:
    check_exact(weight_bits, act_bits, shape[2])
    problem = Problem(shape, weight_bits, act_bits, torch.float32)
    assert torch.equal(problem.run_op().cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_wgmma_tile_equals_the_reference(tile: WgmmaTile, dtype: torch.dtype) -> None:
    _hopper_only()
    bits = (5, 7) if tile.as_bytes else (tile.planes_w, tile.planes_x)
    for shape in SHAPES:
        problem = Problem(shape, *bits, dtype)
        tiles, sums, scales = problem.weight()
        operands = (expand(tiles, shape[2]) if tile.as_bytes else tiles, sums, scales)
        y = problem.output()
        launch_wgmma(
            tile, problem.activations(tile.as_bytes), operands, problem.bias.cuda(), y, shape[2], problem.limits
        )
        assert torch.equal(y.cpu(), problem.expected()), f"{shape=}"


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [1000, 2100, 4100], ids="K{}".format)
@pytest.mark.parametrize("widths", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (5, 7)], ids=str)
def test_blocks_of_several_tiles_equal_the_warp_products(widths: tuple[int, int], columns: int) -> None:
    """Four rounds of the largest tile on 132 multiprocessors, with one, three and five k tiles of bits each."""
    _hopper_only()
    problem = Problem((3000, 6104, columns), *widths, torch.float16)
    as_bytes = widths == (5, 7)
    tiles, sums, scales = problem.weight()
    operands = (expand(tiles, columns) if as_bytes else tiles, sums, scales)
    acts, bias, expected = problem.activations(as_bytes), problem.bias.cuda(), problem.output()
    launch_mma(acts, operands, bias, expected, columns, problem.limits, as_bytes=as_bytes)
    for tile in wgmma_tiles(*((1, 1) if as_bytes else widths), as_bytes):
        for _ in range(3):
            y = problem.output()
            launch_wgmma(tile, acts, operands, bias, y, columns, problem.limits)
            assert torch.equal(y, expected), f"{tile=}"


@pytest.mark.cuda
@pytest.mark.parametrize("as_bytes", [False, True], ids=["bits", "bytes"])
@pytest.mark.parametrize(("weight_bits", "act_bits"), binary_pairs(), ids=[f"w{p}a{q}" for p, q in binary_pairs()])
def test_warp_products_equal_the_reference(weight_bits: int, act_bits: int, as_bytes: bool) -> None:
    for shape in SHAPES:
        problem = Problem(shape, weight_bits, act_bits, torch.float16)
        tiles, sums, scales = problem.weight()
        operands = (expand(tiles, shape[2]) if as_bytes else tiles, sums, scales)
        y, acts = problem.output(), problem.activations(as_bytes)
        launch_mma(acts, operands, problem.bias.cuda(), y, shape[2], problem.limits, as_bytes=as_bytes)
        assert torch.equal(y.cpu(), problem.expected()), f"{shape=}"


@pytest.mark.cuda
@pytest.mark.parametrize("act_bits", [1, 3, 8], ids="a{}".format)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33], ids="M{}".format)
def test_gemv_equals_the_reference(rows: int, act_bits: int) -> None:
    problem = Problem((rows, 77, 2050), 4, act_bits, torch.bfloat16)
    y = problem.output()
    launch_gemv(problem.activations(False), problem.weight(), problem.bias.cuda(), y, 2050, act_bits)
    assert torch.equal(y.cpu(), problem.expected())


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, GEMV_COLUMNS, 200], ids="M{}".format)
@pytest.mark.parametrize(("weight_bits", "act_bits"), [(2, 2), (1, 2), (4, 8)], ids=["w2a2", "w1a2", "w4a8"])
def test_two_runs_and_a_graph_give_the_same_bits(weight_bits: int, act_bits: int, rows: int) -> None:
    problem = Problem((rows, 520, 4096), weight_bits, act_bits, torch.float16)
    tiles, sums, scales = problem.weight()
    x, clip, bias = problem.x.cuda(), problem.clip.cuda(), problem.bias.cuda()
    first = bipolar_prepared_linear(x, tiles, sums, scales, clip, bias, act_bits, True)
    second = bipolar_prepared_linear(x, tiles, sums, scales, clip, bias, act_bits, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = bipolar_prepared_linear(x, tiles, sums, scales, clip, bias, act_bits, True)
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
    columns = min(1030, FLOAT32_INTEGERS // (c_x * c_w))
    x_codes = torch.randint(0, c_x + 1, (65, columns), dtype=torch.uint8)
    w_codes = torch.randint(0, c_w + 1, (70, columns), dtype=torch.uint8)
    x, w = codes_to_values(x_codes, act_bits).long(), codes_to_values(w_codes, weight_bits).long()
    planes = pack_codes(w_codes, weight_bits)
    weight = (tile_weight(planes), plane_row_sums(planes, columns), torch.ones(70, 1, dtype=torch.float16))
    clip = torch.tensor([float(c_x)])  # per tensor: a step of 1
    given = (x.float(), *weight, clip)
    y = bipolar_prepared_linear(*(tensor.to(device) for tensor in given), None, act_bits, False)
    assert torch.equal(y.long().cpu(), x @ w.T)
