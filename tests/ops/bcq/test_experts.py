"""Products of experts: which layouts there are, the joined weights, every kernel against fp64 on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.graph import capture
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.ops.bcq.experts import (
    MOST_EXPERTS,
    ExpertsKernel,
    ExpertsProduct,
    choose_experts_kernel,
    experts_product,
    experts_units,
    gemm_launches,
    gemv_launch,
)
from quantkit.ops.bcq.experts_layouts import experts_layouts
from quantkit.ops.bcq.gemm_launch import gemm_problem
from quantkit.ops.bcq.layout import BcqTiles, join_experts, split_experts
from quantkit.ops.bcq.op import bcq_experts
from tests.ops.bcq.cases import BcqWeight, random_weight
from tests.ops.bcq.test_op import RTOL, TYPES, relative_error

CUDA = torch.device("cuda")
ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]
EXPERTS = 5
# planes, N, K, group size: tiles cut off in N and K, short last groups, K long enough for a cluster
WEIGHTS = [(1, 257, 1000, 32), (2, 130, 777, 96), (3, 96, 2304, 64), (4, 272, 20736, 128), (4, 64, 768, 128)]
WEIGHTS += [(5, 40, 1280, -1), (8, 72, 520, 64)]
WEIGHT_IDS = [f"q{q}-{n}x{k}-g{g}" for q, n, k, g in WEIGHTS]
ROUTES = {
    "one": [3],
    "all in one": [1] * 37,
    "none": [EXPERTS, -1, EXPERTS],
    "every second": [0, 2, 4, 0, 0, 2, 4, 4],
    "uneven": [0] * 70 + [4] * 3 + [EXPERTS, -1] + [2] + [0] * 20,
    "shuffled": (torch.arange(1100) * 7919 % 11 % EXPERTS).tolist(),
}


def _weights(bits: int, n: int, k: int, group_size: int, *, scale_bits: int = 16) -> list[BcqWeight]:
    return [random_weight(bits, n, k, group_size, offset=True, scale_bits=scale_bits) for _ in range(EXPERTS)]


def _expected(x: Tensor, weights: list[BcqWeight], bias: Tensor | None, chosen: list[int]) -> Tensor:
    """[pairs, N] fp64."""
    rows = torch.arange(len(chosen)) // (len(chosen) // len(x))
    numbers, y = torch.tensor(chosen), torch.zeros(len(chosen), weights[0].out_features, dtype=torch.float64)
    for expert, weight in enumerate(weights):
        own = (numbers == expert).nonzero()[:, 0]
        y[own] = x.double().cpu()[rows[own]] @ weight.dequantized().T
        if bias is not None:
            y[own] += bias[expert].double().cpu()
    return y


def _product(x: Tensor, weight: BcqTiles, bias: Tensor | None, chosen: list[int]) -> ExpertsProduct:
    y = torch.full((len(chosen), weight.out_features), float("nan"), dtype=x.dtype, device=x.device)
    return ExpertsProduct(x, weight, bias, torch.tensor(chosen, device=x.device), y)


def test_joined_experts_are_split_into_the_same_weights() -> None:
    weights = [weight.tiled() for weight in _weights(2, 40, 300, 64, scale_bits=8)]
    joined = join_experts(weights)
    assert joined.out_features == 40
    for one, again in zip(weights, split_experts(joined), strict=True):
        assert torch.equal(one.tiles, again.tiles)
        assert torch.equal(one.scale_tiles, again.scale_tiles)
        assert one.factor_tiles is not None
        assert again.factor_tiles is not None
        assert torch.equal(one.factor_tiles, again.factor_tiles)


@pytest.mark.parametrize("chosen", ROUTES.values(), ids=ROUTES)
def test_the_reference_is_a_product_of_every_pair(chosen: list[int]) -> None:
    weights, choices = _weights(3, 40, 300, 64), 2 if len(chosen) % 2 == 0 else 1
    x, bias = torch.randn(len(chosen) // choices, 300), torch.randn(EXPERTS, 40)
    joined = join_experts([weight.tiled() for weight in weights])
    y = bcq_experts(x, torch.tensor(chosen), joined.tiles, joined.scale_tiles, bias, 40, 64)
    expected = _expected(x, weights, bias, chosen)
    assert torch.allclose(y.double(), expected, rtol=RTOL[torch.float32], atol=1e-4)


def test_no_tokens_give_no_rows() -> None:
    joined = join_experts([weight.tiled() for weight in _weights(2, 40, 300, 64)])
    none = torch.empty(0, dtype=torch.int64)
    assert bcq_experts(torch.empty(0, 300), none, joined.tiles, joined.scale_tiles, None, 40, 64).shape == (0, 40)


@pytest.mark.parametrize("row", ROWS)
def test_layouts_of_experts_are_compiled_and_fit(row: Architecture) -> None:
    units, gpu = set(experts_units(row)), Gpu(row, 20)
    weights = [weight.tiled() for weight in _weights(4, 272, 1536, 128)]
    for pairs in (1, 8, 100, 5000):
        product = _product(torch.zeros(pairs, 1536).half(), join_experts(weights), None, [0] * pairs)
        layouts = experts_layouts(gemm_problem(product.weight, pairs, gpu), EXPERTS)
        assert layouts
        for layout in layouts:
            assert {launch.unit for launch in gemm_launches(product, gpu, layout)} <= units
            assert layout.shared_mem <= row.shared_limit()


def test_few_pairs_are_products_of_one_token() -> None:
    hopper, blackwell = ARCHITECTURES[9, 0], ARCHITECTURES[12, 0]
    assert choose_experts_kernel(1, 8, hopper) == ExpertsKernel.GEMV
    assert choose_experts_kernel(8 * 64, 128, hopper) == ExpertsKernel.GEMM
    assert choose_experts_kernel(1, 8, blackwell) == ExpertsKernel.GEMM  # it has no binary tensor cores


@pytest.mark.cuda
@pytest.mark.parametrize(("bits", "n", "k", "group_size"), WEIGHTS, ids=WEIGHT_IDS)
def test_every_layout_matches_fp64_and_repeats(bits: int, n: int, k: int, group_size: int) -> None:
    gpu = gpu_of(torch.device("cuda", 0))
    for number, (route, chosen) in enumerate(ROUTES.items()):
        dtype, scale_bits, choices = TYPES[number % 2], SCALE_BITS[number % 3 == 0], 2 - len(chosen) % 2
        weights = _weights(bits, n, k, group_size, scale_bits=scale_bits)
        joined = join_experts([weight.to(CUDA).tiled() for weight in weights])
        x = torch.randn(len(chosen) // choices, k, device=CUDA).to(dtype)
        bias = torch.randn(EXPERTS, n, device=CUDA).to(dtype) if number % 2 else None
        expected = _expected(x, weights, bias, chosen)
        layouts = experts_layouts(gemm_problem(joined, len(chosen), gpu), EXPERTS)
        for layout in (None, *layouts):
            results = []
            for _ in range(2):
                product = _product(x, joined, bias, chosen)
                launches = (gemv_launch(product, gpu),) if layout is None else gemm_launches(product, gpu, layout)
                for launch in launches:
                    launch.run()
                results.append(product.y)
            assert torch.equal(*results), f"{route=} {layout}"
            if not expected.any():
                assert not results[0].any(), f"{route=} {layout}"
                continue
            error = relative_error(results[0], expected)
            assert error < RTOL[dtype], f"{route=} {dtype=} {scale_bits=} {layout} {error:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ExpertsKernel)
def test_a_graph_follows_the_choices_of_each_replay(kernel: ExpertsKernel) -> None:
    weights = _weights(4, 272, 768, 128)
    joined = join_experts([weight.to(CUDA).tiled() for weight in weights])
    x, chosen = torch.randn(4, 768, device=CUDA).half(), torch.zeros(8, dtype=torch.int64, device=CUDA)
    y = torch.empty(8, 272, device=CUDA).half()

    def call() -> None:
        y.copy_(bcq_experts(x, chosen, joined.tiles, joined.scale_tiles, None, 272, 128, implementation=str(kernel)))

    call()
    graph = capture([call], CUDA)
    for choices in ([0] * 8, [4, 3, 2, 1, 0, 1, 2, 3], [-1, 0, 5, 4, 4, 4, 0, 0]):
        chosen.copy_(torch.tensor(choices))
        graph.replay()
        assert relative_error(y, _expected(x, weights, None, choices)) < RTOL[torch.float16]


@pytest.mark.cuda
def test_what_no_kernel_takes_is_refused() -> None:
    weight = random_weight(2, 16, 48, 24, offset=False).to(CUDA).tiled()
    product = _product(torch.zeros(1, 48, device=CUDA).half(), weight, None, [0])
    with pytest.raises(KernelError, match="groups of 24"):
        experts_product(ExpertsKernel.GEMM, product)
    many = join_experts([random_weight(1, 16, 32, 32, offset=False).to(CUDA).tiled()] * (MOST_EXPERTS + 1))
    product = _product(torch.zeros(1, 32, device=CUDA).half(), many, None, [0])
    with pytest.raises(KernelError, match=f"{MOST_EXPERTS + 1}"):
        experts_product(ExpertsKernel.GEMV, product)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("kernel", ExpertsKernel)
@pytest.mark.parametrize("scale_bits", SCALE_BITS)
def test_odd_routes(scale_bits: int, kernel: ExpertsKernel) -> None:
    weights, chosen = _weights(3, 130, 777, 96, scale_bits=scale_bits), ROUTES["uneven"]
    joined = join_experts([weight.to(CUDA).tiled() for weight in weights])
    x, bias = torch.randn(len(chosen), 777, device=CUDA).half(), torch.randn(EXPERTS, 130, device=CUDA).half()
    y = experts_product(kernel, _product(x, joined, bias, chosen))
    assert relative_error(y, _expected(x, weights, bias, chosen)) < RTOL[torch.float16]
