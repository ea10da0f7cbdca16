"""The GEMV of a weight in the order for batches: every layout against fp64 on a GPU, its sizes in both languages."""

from __future__ import annotations

import importlib.util
from itertools import product as combinations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.compile import CompileUnit, compile_units
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.source import KernelSource
from quantkit.formats.bcq import SCALE_BITS
from quantkit.ops.bcq.instances import SOURCES
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.level_gemv import (
    LEVEL_SEGMENTS,
    TOKENS,
    LevelLayout,
    LevelProblem,
    level_gemv,
    level_launch,
    level_layouts,
    level_problem,
    level_unit,
    level_units,
    plan_level,
)
from quantkit.ops.bcq.order import GRID_PLANES, Order
from quantkit.ops.bcq.product import Product
from quantkit.ops.epilogue import Epilogue, apply_epilogue
from tests.ops.bcq.cases import LEVEL, ODD_GRIDS, ODD_WEIGHTS, BcqWeight, random_weight, weight_case
from tests.ops.bcq.test_op import RTOL, TYPE_IDS, TYPES, reference, relative_error

CUDA = torch.device("cuda")
WEIGHTS = [*ODD_WEIGHTS, weight_case(4, 80, 24700, 128)]  # the last: K in passes and in unequal halves
ODD_TOKENS = (1, 3, 8, 9, 16, 17, 33)


ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
PROCESSORS = 100
SIZES = [(1, 1), (256, 16), (768, 48), (448, 112), (1344, 28), (8016, 32)]  # n tiles, k tiles


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_layout_fits_its_gpu_and_covers_the_weight(sizes: tuple[int, int], row: Architecture) -> None:
    (n_tiles, k_tiles), known = sizes, set(level_units(row))
    kinds = [*((bits, Order.CODES) for bits in range(1, 9)), *((bits, Order.GRID) for bits in GRID_PLANES)]
    for (bits, order), segment, tokens, offset in combinations(kinds, LEVEL_SEGMENTS, (1, 9, 40), (0, 1)):
        entries, gpu = order.scales(bits) + offset, Gpu(row, PROCESSORS)
        it = LevelProblem(bits, entries, 16, segment, n_tiles, k_tiles, tokens, gpu, order)
        assert plan_level(it) == level_layouts(it)[0]
        for layout in level_layouts(it):
            assert layout.shared_mem <= row.shared_limit()
            assert layout.cluster == 1 or row.clusters
            assert layout.pass_tiles * layout.passes >= -(-k_tiles // layout.cluster)
            assert level_unit(it, torch.float16, layout.shape) in known


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
def test_python_and_cuda_agree_on_the_sizes_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    row, claims = ARCHITECTURES[9, 0], []
    kinds = [*((bits, Order.CODES) for bits in (1, 2, 3, 4, 8)), *((bits, Order.GRID) for bits in GRID_PLANES)]
    for (bits, order), segment, offset, tokens in combinations(kinds, LEVEL_SEGMENTS, (0, 1), TOKENS):
        it = LevelProblem(bits, order.scales(bits) + offset, 16, segment, 1, 1, tokens, Gpu(row, 1), order)
        arguments = f"{order.number}, {bits}, {segment}, {tokens}, {int(it.offsets_apart)}, 0"
        name = f"ProductFor<{arguments}>::Type"
        scales = f"{name}::kTileSegments * {name}::Shape::groupVectors({offset}) * kVectorBytes"
        claims.append(
            f"static_assert({name}::Record::kBytes * {name}::kSets + {name}::kSumBytes == {it.x_bytes(tokens)});"
        )
        claims.append(f"static_assert({name}::kTableBytes == {it.level_bytes});")
        claims.append(f"static_assert({name}::Shape::kSignBytes + {scales} == {it.tile_bytes});")
    source = SOURCES[LEVEL]
    monkeypatch.setattr(KernelSource, "text", "\n".join([source.text, *claims, "__global__ void probe() {}"]))
    assert compile_units([CompileUnit(source, "probe")], row).image


def reference_terms(weight: BcqWeight, x: Tensor) -> Tensor:
    """The root of the sum of squares of what every output adds up, [M, N] fp64."""
    return (x.double().cpu().square() @ weight.dequantized().square().T).sqrt()


def _multiply(x: Tensor, weight: BcqTiles, bias: Tensor | None, layout: LevelLayout | None = None) -> Tensor:
    product = Product.of(x, weight, bias)
    product.y.fill_(float("nan"))
    level_launch(product, gpu_of(x.device), layout).run()
    return product.y


@pytest.mark.cuda
@pytest.mark.parametrize(("bits", "n", "k", "group_size"), WEIGHTS)
def test_every_layout_matches_fp64_and_repeats(bits: int, n: int, k: int, group_size: int) -> None:
    for number, tokens in enumerate(ODD_TOKENS):
        dtype, offset, scale_bits = TYPES[number % 2], number % 4 < 2, SCALE_BITS[number % 3 == 0]
        weight = random_weight(bits, n, k, group_size, offset=offset, scale_bits=scale_bits)
        x, bias = torch.randn(tokens, k, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
        tiles, expected = weight.to(CUDA).tiled(Order.CODES), reference(weight, x, bias)
        for layout in level_layouts(level_problem(Product.of(x, tiles, None), gpu_of(x.device))):
            y = _multiply(x, tiles, bias, layout)
            error = relative_error(y, expected)
            assert error < RTOL[dtype], f"{tokens=} {dtype=} {offset=} {scale_bits=} {layout} {error:.2e}"
            assert torch.equal(_multiply(x, tiles, bias, layout), y), layout


@pytest.mark.cuda
@pytest.mark.parametrize(("bits", "n", "k", "group_size"), [*ODD_GRIDS, weight_case(4, 80, 24700, 128)])
def test_every_layout_of_a_grid_matches_fp64_and_repeats(bits: int, n: int, k: int, group_size: int) -> None:
    for number, tokens in enumerate(ODD_TOKENS):
        dtype, offset = TYPES[number % 2], number % 4 < 2
        weight = random_weight(bits, n, k, group_size, offset=offset, equal_steps=True)
        x, bias = torch.randn(tokens, k, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
        tiles, expected = weight.to(CUDA).tiled(Order.GRID), reference(weight, x, bias)
        for layout in level_layouts(level_problem(Product.of(x, tiles, None), gpu_of(x.device))):
            y = _multiply(x, tiles, bias, layout)
            error = relative_error(y, expected)
            assert error < RTOL[dtype], f"{tokens=} {dtype=} {offset=} {layout} {error:.2e}"
            assert torch.equal(_multiply(x, tiles, bias, layout), y), layout


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [3, 13])
@pytest.mark.parametrize(
    ("bits", "group_size", "order"),
    [
        (2, 32, Order.CODES),
        (2, 96, Order.CODES),
        (4, 128, Order.CODES),
        (4, 96, Order.GRID),
        (4, 128, Order.GRID),
        (4, 384, Order.GRID),
        (2, 64, Order.GRID),
        (2, 128, Order.GRID),
        (5, 64, Order.GRID),
        (6, 128, Order.GRID),
        (8, 384, Order.GRID),
    ],
)
def test_odd_shapes(bits: int, group_size: int, order: Order, tokens: int) -> None:
    weight = random_weight(bits, 130, 777, group_size, offset=True, equal_steps=order == Order.GRID)
    x = torch.randn(tokens, 777, device=CUDA).half()
    y = _multiply(x, weight.to(CUDA).tiled(order), None)
    assert relative_error(y, reference(weight, x, None)) < RTOL[torch.float16]


@pytest.mark.cuda
@pytest.mark.parametrize("order", [Order.CODES, Order.GRID])
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_tokens_do_not_disturb_each_other(dtype: torch.dtype, order: Order) -> None:
    weight = random_weight(4, 96, 1024, 128, offset=True, equal_steps=order == Order.GRID).to(CUDA).tiled(order)
    x = torch.randn(12, 1024, device=CUDA).to(dtype)
    before = _multiply(x, weight, None)
    x[2, 700], x[10, 3], x[6] = float("nan"), float("inf"), 0
    y = _multiply(x, weight, None)
    others = [m for m in range(12) if m not in (2, 6, 10)]
    assert torch.equal(y[others], before[others])
    assert not y[[2, 10]].isfinite().any()
    assert not y[6].any()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("bits", GRID_PLANES)
def test_numbers_of_a_grid_keep_small_outputs_of_large_inputs(bits: int, dtype: torch.dtype) -> None:
    """Sums of numbers and of x nearly cancel where all of x is alike."""
    weight = random_weight(bits, 96, 4096, 128, offset=True, equal_steps=True)
    x = (1000 + torch.randn(8, 4096, device=CUDA)).to(dtype)
    y = _multiply(x, weight.to(CUDA).tiled(Order.GRID), None)
    expected, terms = reference(weight, x, None), reference_terms(weight, x)
    rounding = expected.abs() * torch.finfo(dtype).eps / 2  # of outputs that are themselves large
    assert ((y.double().cpu() - expected).abs() < RTOL[dtype] * terms + rounding).all()


@pytest.mark.cuda
def test_a_graph_replays_on_new_inputs() -> None:
    weight = random_weight(4, 512, 1024, 128, offset=True)
    tiles, x = weight.to(CUDA).tiled(Order.CODES), torch.randn(5, 1024, device=CUDA).half()
    product = Product.of(x, tiles, None)
    level_gemv(product)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        level_gemv(product)
    x.copy_(torch.randn(5, 1024))
    graph.replay()
    assert relative_error(product.y, reference(weight, x, None)) < RTOL[torch.float16]


@pytest.mark.cuda
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_the_epilogue_rounds_as_kernels_behind_the_product_do(activation: str | None) -> None:
    weight = random_weight(4, 330, 1024, 128, offset=True).to(CUDA).tiled(Order.CODES)
    x, residual = torch.randn(7, 1024, device=CUDA).half(), torch.randn(7, 330, device=CUDA).half()
    bias = torch.randn(330, device=CUDA).half()
    epilogue = Epilogue(activation, residual)
    plain = level_gemv(Product.of(x, weight, bias))
    y = level_gemv(Product.of(x, weight, bias, epilogue=epilogue))
    assert relative_error(y, apply_epilogue(plain, epilogue).double().cpu()) < RTOL[torch.float16]
