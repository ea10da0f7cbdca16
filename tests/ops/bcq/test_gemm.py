"""The fused product: its layouts on every GPU generation, its sizes in both languages, its results on a GPU."""

from __future__ import annotations

import importlib.util
from itertools import product as combinations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel
from quantkit.cuda.compile import CompileUnit, compile_units
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.source import KernelSource
from quantkit.formats.bcq import SCALE_BITS
from quantkit.ops.bcq.gemm import GemmLayout, GemmProblem, gemm_fits, gemm_layouts, gemm_unit, gemm_units, plan_gemm
from quantkit.ops.bcq.gemm_launch import gemm, gemm_launches, gemm_problem
from quantkit.ops.bcq.instances import SEGMENTS, SOURCES, TILE_K
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.order import GRID_PLANES, Order
from quantkit.ops.bcq.product import Product
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue, apply_epilogue
from tests.ops.bcq.cases import GEMM_MMA, ODD_GRIDS, ODD_WEIGHTS, random_weight
from tests.ops.bcq.test_op import RTOL, TYPE_IDS, TYPES, reference, relative_error

CUDA = torch.device("cuda")
ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
PROCESSORS = 132
BITS = range(1, 9)
SHAPES = [(1, 1), (100, 16), (768, 48), (8016, 16)]  # n tiles, k tiles
TOKENS = (1, 16, 17, 100, 4096)
ODD_TOKENS = (1, 3, 5, 17, 33, 65, 130, 300)
GPUS = {"own": None, "mma": ARCHITECTURES[8, 0]}  # the warp products run on every generation


def _problems(row: Architecture) -> list[GemmProblem]:
    gpu = Gpu(row, PROCESSORS)
    return [
        GemmProblem(bits, order.scales(bits) + offset, scale_bits, TILE_K // segment, *shape, tokens, gpu, order)
        for order, scale_bits in ((Order.PLANES, 16), (Order.CODES, 8), (Order.GRID, 16))
        for bits, offset, segment, shape, tokens in combinations(BITS, (0, 1), SEGMENTS, SHAPES, TOKENS)
        if gemm_fits(bits, segment, row) and (order != Order.GRID or bits in GRID_PLANES)
    ]


@pytest.mark.parametrize("row", ROWS)
def test_every_weight_that_fits_has_a_layout_with_a_known_instance(row: Architecture) -> None:
    units, limit = set(gemm_units(row)), row.shared_limit()
    for problem in _problems(row):
        for layout in gemm_layouts(problem):
            assert layout.shared_mem <= limit
            phases = layout.shape.phases
            round_stages = phases * layout.shape.tile_stages if phases > 1 else 1
            rounds = 2 if layout.shape.groups > 4 else 1  # many groups never all wait for the next k tile of x
            least = max(2, rounds * round_stages)  # within a tile the next is waited for while one is read
            assert layout.stages >= least
            assert layout.stages % round_stages == 0  # a stage is always of the same phase
            assert layout.ranges * layout.shape.partners <= problem.n_tiles  # every block has rows
            assert layout.grid <= PROCESSORS  # all blocks run at once, as they wait for each other
            items = layout.ranges * layout.token_tiles
            alone = layout.shape.warpgroups and layout.blocks == layout.whole_items == items
            assert layout.spare == (alone and (items + 1) * layout.cluster <= PROCESSORS)  # a block without an item
            assert {gemm_unit(problem, dtype, layout.shape) for dtype in TYPES} <= units
        assert plan_gemm(problem) == gemm_layouts(problem)[0]


@pytest.mark.parametrize("row", ROWS)
def test_k_is_split_on_warpgroups_where_there_is_room_for_two_blocks_an_item(row: Architecture) -> None:
    gpu, splits = Gpu(row, PROCESSORS), Kernel.BCQ_GEMM_WGMMA in row.kernels
    for n_tiles, k_tiles, ours in ((256, 56, splits), (1792, 16, False), (256, 1, False), (768, 48, splits)):
        problem = GemmProblem(4, 5, 16, 2, n_tiles, k_tiles, 16, gpu, Order.CODES)
        split = [layout for layout in gemm_layouts(problem) if layout.splits > 1]
        assert bool(split) == ours
        for layout in split:
            assert layout.cluster == 2
            assert layout.shared_items == layout.partial_floats == 0  # sums stay within the cluster
            assert layout.grid == 2 * (layout.ranges * layout.token_tiles + layout.spare) <= PROCESSORS
        assert (plan_gemm(problem).splits > 1) == ours  # it is faster than any other way of these


@pytest.mark.parametrize("row", ROWS)
def test_groups_of_128_fit_at_every_width(row: Architecture) -> None:
    assert all(gemm_fits(bits, 128, row) for bits in BITS)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
def test_python_and_cuda_agree_on_the_sizes_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one compiles to an error: the sizes are asserted in the source."""
    row = ARCHITECTURES[9, 0]
    lines = []
    kinds = [*((bits, Order.PLANES) for bits in BITS), *((bits, Order.GRID) for bits in GRID_PLANES)]
    for (bits, order), offset, segments in combinations(kinds, (0, 1), (1, 8)):
        it = GemmProblem(bits, order.scales(bits) + offset, 16, segments, 1, 1, 1, Gpu(row, PROCESSORS), order)
        for layout in gemm_layouts(it):
            shape = layout.shape
            sizes = ", ".join(map(str, (shape.tokens, shape.row_groups, shape.phases, shape.slots)))
            expansion = f"ExpansionOf<{order.number}, {bits}, {int(it.offsets_apart)}, 0>::Type"
            name = f"GemmShape<{expansion}, {sizes}>"
            scales = f"{segments} * QK_TILE_N * {it.entries} * 2"
            lines += [
                f"static_assert({segments} * {name}::kSegmentTable == {it.table_bytes});",
                f"static_assert({name}::kPlaneBytes + {scales} == {it.slot_bytes});",
                f"static_assert({name}::kStageBytes == {shape.stage_bytes});",
                f"static_assert({name}::kTileStages == {shape.tile_stages});",
                f"static_assert({name}::Splits::kBytes == {shape.split_bytes});",
            ]
            if it.multiplies_numbers(shape):
                lines.append(f"static_assert({name}::kNumbers && SumsOfX<{name}>::kStageBytes == {shape.sum_bytes});")
    source = SOURCES[GEMM_MMA]
    text = source.text + "\n".join(dict.fromkeys(lines)) + "\n__global__ void agrees() {}\n"
    monkeypatch.setattr(KernelSource, "text", text)
    assert compile_units([CompileUnit(KernelSource("bcq/sizes.cu", source.constants), "agrees")], row).image


def _gpu(row: Architecture | None) -> Gpu:
    own = gpu_of(torch.device("cuda", 0))
    return own if row is None else Gpu(row, own.processors)


def _multiply(
    x: Tensor, weight: BcqTiles, bias: Tensor | None, gpu: Gpu, layout: GemmLayout, epilogue: Epilogue = NO_EPILOGUE
) -> Tensor:
    product = Product.of(x, weight, bias, epilogue=epilogue)
    product.y.fill_(float("nan"))
    for launch in gemm_launches(product, gpu, layout):
        launch.run()
    return product.y


def _layouts(weight: BcqTiles, tokens: int, gpu: Gpu) -> list[GemmLayout]:
    return gemm_layouts(gemm_problem(weight, tokens, gpu))


@pytest.mark.cuda
@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(("bits", "n", "k", "group_size"), ODD_WEIGHTS)
def test_every_layout_matches_fp64_and_repeats(
    bits: int, n: int, k: int, group_size: int, row: Architecture | None
) -> None:
    gpu = _gpu(row)
    for number, tokens in enumerate(ODD_TOKENS):
        dtype, offset, scale_bits = TYPES[number % 2], number % 4 < 2, SCALE_BITS[number % 3 == 0]
        weight = random_weight(bits, n, k, group_size, offset=offset, scale_bits=scale_bits)
        x, bias = torch.randn(tokens, k, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
        order = (Order.PLANES, Order.CODES)[number // 2 % 2]
        tiles, expected = weight.to(CUDA).tiled(order), reference(weight, x, bias)
        for layout in _layouts(tiles, tokens, gpu):
            y = _multiply(x, tiles, bias, gpu, layout)
            error = relative_error(y, expected)
            assert error < RTOL[dtype], f"{tokens=} {dtype=} {offset=} {scale_bits=} {order=} {layout} {error:.2e}"
            assert torch.equal(_multiply(x, tiles, bias, gpu, layout), y), layout


@pytest.mark.cuda
@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize(("bits", "n", "k", "group_size"), ODD_GRIDS)
def test_every_layout_of_a_grid_matches_fp64_and_repeats(
    bits: int, n: int, k: int, group_size: int, row: Architecture | None
) -> None:
    gpu = _gpu(row)
    for number, tokens in enumerate(ODD_TOKENS):
        dtype, offset = TYPES[number % 2], number % 4 < 2
        weight = random_weight(bits, n, k, group_size, offset=offset, equal_steps=True)
        x, bias = torch.randn(tokens, k, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
        tiles, expected = weight.to(CUDA).tiled(Order.GRID), reference(weight, x, bias)
        for layout in _layouts(tiles, tokens, gpu):
            y = _multiply(x, tiles, bias, gpu, layout)
            error = relative_error(y, expected)
            assert error < RTOL[dtype], f"{tokens=} {dtype=} {offset=} {layout} {error:.2e}"
            assert torch.equal(_multiply(x, tiles, bias, gpu, layout), y), layout


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("tokens", [3, 30, 70])
@pytest.mark.parametrize(
    ("bits", "group_size", "order"),
    [
        *((2, 32, Order.PLANES), (2, 96, Order.PLANES), (4, 128, Order.CODES), (4, 64, Order.GRID)),
        *((2, 128, Order.GRID), (5, 128, Order.GRID), (6, 64, Order.GRID), (8, 128, Order.GRID)),
    ],
)
def test_planned_layout_on_odd_shapes(
    bits: int, group_size: int, order: Order, tokens: int, row: Architecture | None
) -> None:
    gpu = _gpu(row)
    weight = random_weight(bits, 130, 777, group_size, offset=True, equal_steps=order == Order.GRID)
    x, tiles = torch.randn(tokens, 777, device=CUDA).half(), weight.to(CUDA).tiled(order)
    y = _multiply(x, tiles, None, gpu, _layouts(tiles, tokens, gpu)[0])
    assert relative_error(y, reference(weight, x, None)) < RTOL[torch.float16]


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [70, 300])
@pytest.mark.parametrize("order", Order)
def test_partners_on_odd_shapes(order: Order, tokens: int) -> None:
    gpu, weight = _gpu(None), random_weight(4, 330, 777, 128, offset=True, equal_steps=order == Order.GRID)
    x, tiles = torch.randn(tokens, 777, device=CUDA).half(), weight.to(CUDA).tiled(order)
    pairs = [layout for layout in _layouts(tiles, tokens, gpu) if layout.shape.partners > 1]
    if not pairs:
        pytest.skip("this GPU has no blocks that copy for each other")
    for layout in pairs:
        y = _multiply(x, tiles, None, gpu, layout)
        assert relative_error(y, reference(weight, x, None)) < RTOL[torch.float16]
        assert torch.equal(_multiply(x, tiles, None, gpu, layout), y)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [3, 30, 70, 130])
@pytest.mark.parametrize("order", Order)
def test_halves_of_split_k_on_odd_shapes(order: Order, tokens: int) -> None:
    gpu, weight = _gpu(None), random_weight(4, 333, 777, 128, offset=True, equal_steps=order == Order.GRID)
    x, bias = torch.randn(tokens, 777, device=CUDA).half(), torch.randn(333, device=CUDA).half()
    tiles, expected = weight.to(CUDA).tiled(order), reference(weight, x, bias)
    split = [layout for layout in _layouts(tiles, tokens, gpu) if layout.splits > 1]
    if not split:
        pytest.skip("this GPU has no clusters with warpgroup products")
    for layout in split:
        y = _multiply(x, tiles, bias, gpu, layout)
        assert relative_error(y, expected) < RTOL[torch.float16]
        assert torch.equal(_multiply(x, tiles, bias, gpu, layout), y)


@pytest.mark.cuda
@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("k", [1000, 1001, 1024])
def test_rows_of_x_that_are_no_aligned_vectors_are_copied_first(k: int, row: Architecture | None) -> None:
    """The order for batches takes x as it is; what stands behind its columns and its tokens must not count."""
    gpu, weight = _gpu(row), random_weight(4, 130, k, 128, offset=True)
    tiles, memory = weight.to(CUDA).tiled(Order.CODES), torch.full((80 * k,), float("nan"), device=CUDA).half()
    for tokens, start in ((5, 0), (70, 3), (17, 8)):
        x = memory[start : start + tokens * k].view(tokens, k).normal_()
        for layout in _layouts(tiles, tokens, gpu):
            assert relative_error(_multiply(x, tiles, None, gpu, layout), reference(weight, x, None)) < RTOL[x.dtype]
        memory.fill_(float("nan"))


@pytest.mark.cuda
@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("order", [Order.CODES, Order.GRID])
def test_tokens_do_not_disturb_each_other(order: Order, dtype: torch.dtype, row: Architecture | None) -> None:
    stored = random_weight(4, 96, 1024, 128, offset=True, equal_steps=order == Order.GRID)
    gpu, weight = _gpu(row), stored.to(CUDA).tiled(order)
    x = torch.randn(40, 1024, device=CUDA).to(dtype)
    for layout in _layouts(weight, 40, gpu):
        before = _multiply(x, weight, None, gpu, layout)
        poisoned = x.clone()
        poisoned[2, 700], poisoned[33, 3], poisoned[6] = float("nan"), float("inf"), 0
        y = _multiply(poisoned, weight, None, gpu, layout)
        others = [m for m in range(40) if m not in (2, 6, 33)]
        assert torch.equal(y[others], before[others])
        assert not y[[2, 33]].isfinite().any()
        assert not y[6].any()


@pytest.mark.cuda
@pytest.mark.parametrize("order", Order)
def test_thousands_of_tokens_through_the_op(order: Order) -> None:
    weight = random_weight(4, 1040, 1536, 128, offset=True, equal_steps=order == Order.GRID)
    tiles, x = weight.to(CUDA).tiled(order), torch.randn(4095, 1536, device=CUDA).half()
    gpu = _gpu(None)
    y = _multiply(x, tiles, None, gpu, plan_gemm(gemm_problem(tiles, 4095, gpu)))
    assert relative_error(y, reference(weight, x, None)) < RTOL[torch.float16]


@pytest.mark.cuda
@pytest.mark.parametrize("order", [Order.PLANES, Order.CODES])
@pytest.mark.parametrize(("tokens", "partners"), [(5, 1), (70, 1), (300, 2)])
def test_a_graph_replays_what_blocks_add_up_for_each_other(tokens: int, partners: int, order: Order) -> None:
    """The counts by which blocks wait for each other begin at zero in every replay."""
    weight = random_weight(4, 1040, 2560, 128, offset=True)
    tiles, gpu = weight.to(CUDA).tiled(order), _gpu(None)
    shared = [it for it in _layouts(tiles, tokens, gpu) if it.shared_items and it.shape.partners == partners]
    if not shared:
        pytest.skip("this GPU has no blocks that copy for each other")
    layout, x = shared[0], torch.randn(tokens, 2560, device=CUDA).half()
    expected = _multiply(x, tiles, None, gpu, layout)
    graph, product = torch.cuda.CUDAGraph(), Product.of(x, tiles, None)
    with torch.cuda.graph(graph):
        for _ in range(3):
            for launch in gemm_launches(product, gpu, layout):
                launch.run()
    for _ in range(3):
        product.y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(product.y, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("order", Order)
def test_graphs_run_beside_each_other_and_beside_other_launches(order: Order) -> None:
    """Whatever runs at the same time counts apart."""
    weight = random_weight(4, 1040, 2560, 128, offset=True, equal_steps=order == Order.GRID)
    tiles, gpu, tokens = weight.to(CUDA).tiled(order), _gpu(None), 40
    layout = next(layout for layout in _layouts(tiles, tokens, gpu) if layout.shared_items)
    xs = [torch.randn(tokens, 2560, device=CUDA).half() for _ in range(3)]
    expected = [_multiply(x, tiles, None, gpu, layout) for x in xs]
    products, graphs = [Product.of(x, tiles, None) for x in xs], [torch.cuda.CUDAGraph() for _ in xs[1:]]
    for graph, product in zip(graphs, products, strict=False):
        with torch.cuda.graph(graph):
            for launch in gemm_launches(product, gpu, layout):
                launch.run()
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        for launch in gemm_launches(products[-1], gpu, layout):
            launch.run()
    torch.cuda.synchronize()
    assert all(torch.equal(product.y, y) for product, y in zip(products, expected, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("n", [330, 336], ids=["rows of y that are no vectors", "vectors"])
def test_every_layout_has_the_epilogue_to_the_bit(n: int, row: Architecture | None) -> None:
    gpu, weight = _gpu(row), random_weight(4, n, 512, 128, offset=True, equal_steps=True)
    for number, tokens in enumerate((3, 20, 70, 130, 300)):
        dtype, order = TYPES[number % 2], tuple(Order)[number % len(Order)]
        x, bias = torch.randn(tokens, 512, device=CUDA).to(dtype), torch.randn(n, device=CUDA).to(dtype)
        memory, tiles = torch.randn(tokens * n + 1, device=CUDA).to(dtype), weight.to(CUDA).tiled(order)
        residuals = memory[:-1].view(tokens, n), memory[1:].view(tokens, n)  # the second begins at no vector
        for layout in _layouts(tiles, tokens, gpu):
            plain = _multiply(x, tiles, bias, gpu, layout)
            for activation, residual in combinations(("relu", None), (None, *residuals)):
                epilogue = Epilogue(activation, residual)
                y = _multiply(x, tiles, bias, gpu, layout, epilogue)
                assert torch.equal(y, apply_epilogue(plain, epilogue)), f"{tokens=} {dtype=} {order=} {layout}"


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("n", [330, 336], ids=["rows of y that are no vectors", "vectors"])
@pytest.mark.parametrize("tokens", [20, 130])
@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_the_epilogue_rounds_as_kernels_behind_the_product_do(activation: str | None, tokens: int, n: int) -> None:
    weight = random_weight(4, n, 1024, 128, offset=True).to(CUDA).tiled(Order.CODES)
    x, residual = torch.randn(tokens, 1024, device=CUDA).half(), torch.randn(tokens, n, device=CUDA).half()
    bias = torch.randn(n, device=CUDA).half()
    epilogue = Epilogue(activation, residual)
    plain = gemm(Product.of(x, weight, bias))
    y = gemm(Product.of(x, weight, bias, epilogue=epilogue))
    assert relative_error(y, apply_epilogue(plain, epilogue).double().cpu()) < RTOL[torch.float16]
