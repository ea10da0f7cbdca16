"""Products that go on as codes, against the product, the activation function and the quantizer one by one."""

from __future__ import annotations

import pytest
import torch

from quantkit.cuda.device import gpu_of
from quantkit.errors import KernelError
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.flatten.instances import GEMM_TILES, GemmTile
from quantkit.ops.flatten.launch import Product, Requantization, mma_launch, wgmma_launch
from quantkit.ops.flatten.layout import code_tiles, column_map, tile_codes, untile_codes
from quantkit.ops.flatten.op import int8_gemm_requantize
from tests.ops.flatten.requantize_problem import SHAPES, RequantizeProblem, assert_same_codes

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]
NAMES = [
    pytest.param("relu", marks=pytest.mark.sanitize),
    *(name for name in ACTIVATIONS if name != "relu"),
]
HOPPER = (9, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("act_bits", [4, 8], ids=["int4", "int8"])
@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
@pytest.mark.parametrize("activation", NAMES)
def test_codes_are_those_of_the_ops_one_by_one(
    device: torch.device, activation: str, smooth: bool, act_bits: int, dtype: torch.dtype
) -> None:
    for shape in SHAPES:
        problem = RequantizeProblem(shape, dtype, device, act_bits=act_bits, smooth=smooth)
        assert_same_codes(problem.apart(activation, problem.fused(activation)), activation)


@pytest.mark.sanitize
@pytest.mark.parametrize("act_bits", [4, 8], ids=["int4", "int8"])
def test_nibble_weights_give_the_same(device: torch.device, act_bits: int) -> None:
    problem = RequantizeProblem((65, 130, 416), torch.float16, device, act_bits=act_bits, weight_bits=4)
    assert_same_codes(problem.apart("relu", problem.fused("relu")), "relu")


@pytest.mark.sanitize
@pytest.mark.parametrize("weight_bits", [4, 8], ids=["int4", "int8"])
def test_a_scale_per_feature_gives_the_codes_of_the_ops_one_by_one(device: torch.device, weight_bits: int) -> None:
    for shape in SHAPES:
        problem = RequantizeProblem(shape, torch.float16, device, weight_bits=weight_bits, smooth=True, row_scales=True)
        assert problem.weight_scale.shape == (shape[1], 1)
        assert_same_codes(problem.apart("relu", problem.fused("relu")), "relu")


def test_largest_and_undefined_values_keep_their_codes(device: torch.device) -> None:
    problem = RequantizeProblem((7, 65, 160), torch.float16, device)
    problem.bias[:3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    for activation in ACTIVATIONS:
        assert_same_codes(problem.apart(activation, problem.fused(activation)), activation)


def test_slots_stand_by_channel_and_give_the_map_back() -> None:
    problem = RequantizeProblem((1, 70, 160), torch.float16, CPU)
    slots, starts = problem.slots()
    assert (slots.dtype, starts.dtype) == (torch.int32, torch.int32)
    assert slots[1].tolist() == sorted(slots[1].tolist())
    assert starts[0] == 0
    assert starts[-1] == slots.shape[1] == 90
    for run, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        assert all(channel // 32 == run for channel in slots[1, begin:end].tolist())
    channel, segment = column_map(slots, 70)
    assert torch.equal(channel, problem.channel)
    assert torch.equal(segment, problem.segment)


@pytest.mark.parametrize("extended", [128, 416])
def test_kernels_addresses_are_the_tile_order(extended: int) -> None:
    """codeOffset and tileOffset of kernels/flatten/int8_requantize.cuh, against the layout that tile_codes makes."""
    codes = torch.randint(-127, 128, (130, extended), dtype=torch.int8)
    tiles, k_tiles = tile_codes(codes), -(-extended // 128)
    row, column = torch.arange(130)[:, None], torch.arange(extended)[None]
    line = (row // 64 * k_tiles + column // 128) * 64 * 128
    byte = column % 128
    offset = line + row % 64 * 128 + (byte // 16 ^ row % 8) * 16 + byte % 16
    assert torch.equal(tiles.flatten()[offset], codes)
    own = torch.arange(0, extended, 8)  # eight codes are one aligned store
    assert torch.equal(offset[:, own] + 7, offset[:, own + 7])
    assert not (offset[:, own] % 8).any()


def test_no_rows_give_no_rows(device: torch.device) -> None:
    problem = RequantizeProblem((1, 65, 160), torch.float16, device)
    acts, *operands = problem.operands()
    rest = 0, 65, torch.float16, "relu", problem.multiplier, *problem.slots(), 8
    assert int8_gemm_requantize(acts[:0], *operands, *rest).shape[0] == 0


@pytest.mark.cuda
def test_types_without_a_kernel_are_refused() -> None:
    with pytest.raises(KernelError, match="float16, bfloat16 here on a GPU, not float32"):
        RequantizeProblem((7, 65, 160), torch.float32, torch.device("cuda")).fused("relu")


def _product(problem: RequantizeProblem, activation: str, packed_acts: bool = False) -> Product:
    """With room for the codes, zeroed: columns behind the last are not written."""
    acts, tiles, *scales, bias = problem.operands(packed_acts)
    target = problem.multiplier, *problem.slots(), problem.act_bits
    number = ACTIVATIONS[activation].number
    requantization = Requantization(problem.tokens, problem.out_features, problem.dtype, number, *target)
    out = code_tiles(problem.tokens, problem.extended, False, acts.device).zero_()
    return Product(acts, tiles, (scales[0], scales[1]), bias, out, requantization)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("row_scales", [False, True], ids=["one scale", "row scales"])
@pytest.mark.parametrize("tile", GEMM_TILES, ids=str)
def test_every_wgmma_tile_gives_the_same_codes(
    tile: GemmTile, row_scales: bool, activation: str, dtype: torch.dtype
) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("warpgroup products need compute capability 9.0")
    for shape in [*SHAPES, (1000, 2056, 2560)]:
        problem = RequantizeProblem(shape, dtype, torch.device("cuda"), smooth=True, row_scales=row_scales)
        product = _product(problem, activation)
        wgmma_launch(product, tile, gpu_of(product.out.device).processors).run()
        assert_same_codes(problem.apart(activation, product.out), activation)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("row_scales", [False, True], ids=["one scale", "row scales"])
def test_warp_products_give_the_same_codes(row_scales: bool, activation: str, bits: int, dtype: torch.dtype) -> None:
    for shape in [*SHAPES, (1000, 2056, 2560)]:
        problem = RequantizeProblem(shape, dtype, torch.device("cuda"), weight_bits=bits, row_scales=row_scales)
        product = _product(problem, activation, packed_acts=bits == 4)
        mma_launch(product).run()
        assert_same_codes(problem.apart(activation, product.out), activation)


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [1, 65, 200])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_runs_and_a_graph_give_the_same_codes(activation: str, tokens: int) -> None:
    problem = RequantizeProblem((tokens, 520, 648 + 56), torch.float16, torch.device("cuda"))
    operands, slots = problem.operands(), problem.slots()
    rest = tokens, 520, torch.float16, activation, problem.multiplier, *slots, 8

    def run() -> torch.Tensor:
        return untile_codes(int8_gemm_requantize(*operands, *rest), tokens, problem.extended)

    first, second = run(), run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    assert torch.equal(first, captured)
