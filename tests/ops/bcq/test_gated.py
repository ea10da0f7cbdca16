"""Products of gates and ups that end with silu(gate) * up, against the product and then the activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, Kernel
from quantkit.cuda.device import Gpu, gpu_of
from quantkit.cuda.launch import Launch
from quantkit.formats.bcq import SCALE_BITS, BcqTensors
from quantkit.ops.activations import ACTIVATIONS
from quantkit.ops.bcq.candidates import candidates
from quantkit.ops.bcq.gated import bcq_gated, can_interleave, interleave_gates
from quantkit.ops.bcq.gemm import gemm_layouts
from quantkit.ops.bcq.gemm_launch import gemm_launches, gemm_problem
from quantkit.ops.bcq.launch import product
from quantkit.ops.bcq.layout import BcqTiles
from quantkit.ops.bcq.level_gemv import level_launch, level_layouts, level_problem
from quantkit.ops.bcq.op import bcq_linear_reference
from quantkit.ops.bcq.order import Order
from quantkit.ops.bcq.product import Product
from quantkit.ops.decode.op import gated_halves
from quantkit.ops.epilogue import GATED_ROWS, GATED_SILU, NO_EPILOGUE
from tests.ops.bcq.cases import BcqWeight, random_weight
from tests.ops.bcq.test_op import TYPE_IDS, TYPES

CUDA = torch.device("cuda")
SHAPES = [(32, 256, 128), (336, 777, 128), (2064, 4608, -1), (80, 24700, 128)]  # N, K, group size
CASES = [*((*shape, order) for shape in SHAPES for order in Order), (272, 1000, 40, Order.PLANES)]  # the last: look-ups
GENERATIONS = {"own": None, "mma": ARCHITECTURES[8, 0]}  # the warp products run on every generation
FAR = 60.0  # of gates from 0: silu is then the gate, or less than a 16-bit float has


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
def test_rows_in_turn_give_what_halves_do(offset: bool, scale_bits: int) -> None:
    weight, x = random_weight(3, 48, 328, 64, offset=offset, scale_bits=scale_bits), torch.randn(2, 5, 328)
    gate, up = bcq_linear_reference(x, weight.stored, None, 64).chunk(2, -1)
    turned = BcqWeight(BcqTensors.of(interleave_gates(weight.stored.named())), 64, 328).tiled()
    held = turned.tiles, turned.scale_tiles, None, 48, 64
    y = bcq_gated(x, *held, factor_tiles=turned.factor_tiles)
    assert y.shape == (2, 5, 24)
    assert torch.equal(y, ACTIVATIONS["silu"].apply(gate) * up)


def test_halves_of_other_sizes_do_not_pair() -> None:
    assert [can_interleave(out_features) for out_features in (8, 12, 11008)] == [True, False, True]


def _inputs(weight: BcqTiles, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and a bias that spreads gates far to both sides of 0."""
    x = torch.randn(tokens, weight.in_features, device=CUDA).to(dtype)
    return x, (torch.randn(weight.out_features, device=CUDA) * FAR).to(dtype)


def _gated_apart(y: Tensor) -> Tensor:
    """The activation of y [M, N] by the kernel for it alone."""
    return gated_halves(y.view(-1, 2 * GATED_ROWS), "silu").view(len(y), -1)


def _agree(weight: BcqTiles, tokens: int, dtype: torch.dtype, multiply: Callable[[Product], Tensor]) -> None:
    x, bias = _inputs(weight, tokens, dtype)
    plain = multiply(Product.of(x, weight, bias))
    whole = Product.of(x, weight, bias, epilogue=GATED_SILU)
    whole.y.fill_(float("nan"))
    assert torch.equal(multiply(whole), _gated_apart(plain)), (tokens, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize(("n", "k", "group_size", "order"), CASES)
def test_every_kernel_gates_to_the_bit(n: int, k: int, group_size: int, order: Order, dtype: torch.dtype) -> None:
    weight = random_weight(2, n, k, group_size, offset=True, equal_steps=True).to(CUDA).tiled(order)
    row = gpu_of(CUDA).architecture
    kernels = candidates(dtype, row, weight_bits=2, group_size=group_size, in_features=k, order=order)
    for number, kernel in enumerate(kernels):
        for tokens in (1, 2, 5, 19) if kernel != Kernel.BCQ_LUT_GEMV else (3,):
            x, bias = _inputs(weight, tokens + number, dtype)
            plain, whole = (product(kernel, x, weight, bias, epilogue=each) for each in (NO_EPILOGUE, GATED_SILU))
            assert torch.equal(whole, _gated_apart(plain)), (kernel, tokens)


def _run(it: Product, launches: Sequence[Launch]) -> Tensor:
    for launch in launches:
        launch.run()
    return it.y


ORDERS = {Order.GRID: (4, torch.float16), Order.CODES: (4, torch.bfloat16), Order.PLANES: (3, torch.float16)}


def _weight(order: Order) -> tuple[BcqTiles, torch.dtype]:
    bits, dtype = ORDERS[order]
    weight = random_weight(bits, 336, 1300, 128, offset=True, equal_steps=order == Order.GRID)
    return weight.to(CUDA).tiled(order), dtype


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("row", GENERATIONS.values(), ids=GENERATIONS)
@pytest.mark.parametrize("tokens", [3, 30, 70, 130, 300])
@pytest.mark.parametrize("order", ORDERS)
def test_every_layout_of_the_fused_product_gates_to_the_bit(
    order: Order, tokens: int, row: Architecture | None
) -> None:
    own, (weight, dtype) = gpu_of(CUDA), _weight(order)
    gpu = own if row is None else Gpu(row, own.processors)
    for layout in gemm_layouts(gemm_problem(weight, tokens, gpu)):
        _agree(weight, tokens, dtype, lambda it, layout=layout: _run(it, gemm_launches(it, gpu, layout)))


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("tokens", [1, 9, 33])
@pytest.mark.parametrize("order", [order for order in ORDERS if order.for_batches])
def test_every_layout_of_the_gemv_for_batches_gates_to_the_bit(order: Order, tokens: int) -> None:
    gpu, (weight, dtype) = gpu_of(CUDA), _weight(order)
    x, _ = _inputs(weight, tokens, dtype)
    for layout in level_layouts(level_problem(Product.of(x, weight, None), gpu)):
        _agree(weight, tokens, dtype, lambda it, layout=layout: _run(it, [level_launch(it, gpu, layout)]))
