"""Rows that norms and gated activations write in a product's order: the bits of the norm, put in order afterwards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as pairs

import pytest
import torch
from torch import Tensor

from quantkit.cuda.architectures import ARCHITECTURES, Architecture
from quantkit.cuda.launch import FixedLaunches
from quantkit.errors import KernelError
from quantkit.ops.bcq import arranged
from quantkit.ops.bcq.arranged import ArrangedInput, InputOrder, arranged_gated, arranged_norm
from quantkit.ops.bcq.bound import arranged_product, input_order
from quantkit.ops.bcq.gemm import ARRANGE, arrange_launch, gemm_kernel
from quantkit.ops.bcq.instances import TILE_K
from quantkit.ops.bcq.op import BcqLinearPrepared, bcq_linear_with_epilogue
from quantkit.ops.bcq.order import Order
from quantkit.ops.decode.op import gated, norm
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue
from tests.ops.bcq.cases import random_weight
from tests.ops.launches import record
from tests.ops.test_fixed_launches import Keys

CUDA = torch.device("cuda")
TYPES = [torch.float16, torch.bfloat16]
TYPE_IDS = ["fp16", "bf16"]
ROWS = [
    (1, 8),
    (3, 136),
    (17, 4096),
    (65, 4104),
    (300, 14336),
    (33, 16384),
]  # M, K; K in parts of tiles, and many vectors
FUSED_TOKENS = 200  # of which a fused product is the usual kernel wherever there is one
EPSILON = 1e-5
WITH_FUSED = [row for row in ARCHITECTURES.values() if gemm_kernel(row) is not None]


def zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of tokens that are none are not written, and are compared here."""
    monkeypatch.setattr(
        arranged, "_memory", lambda order, device: torch.zeros(order.work_bytes, dtype=torch.uint8, device=device)
    )


def put_in_order(x: Tensor, order: InputOrder) -> Tensor:
    """What bcqArrange makes of x, in memory like that of ``zeroed``."""
    memory = torch.zeros(order.work_bytes, dtype=torch.uint8, device=x.device)
    flat = x.view(-1, x.shape[-1])
    sizes = {"tokens": len(flat), "tile_tokens": order.tile_tokens, "bits": order.weight_bits}
    arrange_launch(ARRANGE, flat, arranged=memory, **sizes, own={}).run()
    return memory


def order_for(tokens: int, columns: int, bits: int, tile_tokens: int) -> InputOrder:
    tiles = -(-tokens // tile_tokens), -(-columns // TILE_K)
    return InputOrder(bits, tile_tokens, 2 * tiles[0] * tile_tokens * tiles[1] * TILE_K)


def prepared(x: Tensor, order: Order = Order.PLANES) -> BcqLinearPrepared:
    torch.manual_seed(3)
    weight = random_weight(3, 272, x.shape[-1], 128, offset=True).to(x.device).tiled(order)
    held = weight.tiles, weight.scale_tiles, None, weight.out_features, weight.group_size
    return BcqLinearPrepared(x, *held, order=order.value, weights_ready=True)


@pytest.mark.parametrize("row", WITH_FUSED, ids=[row.title for row in WITH_FUSED])
def test_addresses_are_open_and_all_else_follows_from_the_key(
    row: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, row)
    keys = Keys()
    monkeypatch.setattr(FixedLaunches, "run", lambda *given: keys.take(*given))
    for (tokens, columns), dtype, bits, tile_tokens in pairs(ROWS * 2, TYPES, (1, 3), (16, 64)):
        order = order_for(tokens, columns, bits, tile_tokens)
        x, weight = torch.randn(tokens, columns).to(dtype), torch.randn(columns).to(dtype)
        for bias, centered in ((None, False), (weight, True)):
            assert arranged_norm(x, (weight, bias), EPSILON, order, centered=centered).shape == x.shape
        for up in (x, torch.randn(tokens, columns + 8).to(dtype)[:, :columns]):
            assert arranged_gated(x, up, "silu", order).memory.nbytes == order.work_bytes
    assert keys.count == 2 * len(keys.known) > 0


@pytest.mark.parametrize("row", WITH_FUSED, ids=[row.title for row in WITH_FUSED])
def test_a_product_that_reads_rows_as_they_are_has_no_order(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    record(monkeypatch, row)
    x = torch.randn(FUSED_TOKENS, 1024).half()
    assert input_order(prepared(x, Order.CODES), NO_EPILOGUE) is None
    assert input_order(prepared(x[:1]), NO_EPILOGUE) is None  # a GEMV


@pytest.mark.parametrize("row", WITH_FUSED, ids=[row.title for row in WITH_FUSED])
def test_a_product_takes_rows_in_its_own_order_alone(row: Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record(monkeypatch, row)
    x = torch.randn(2, FUSED_TOKENS // 2, 1024).half()
    op, like = prepared(x), torch.randn(2, FUSED_TOKENS // 2, 2048).half()[..., :1024]
    order = input_order(op._replace(x=like), NO_EPILOGUE)
    assert order is not None
    assert order == input_order(op, Epilogue(residual=torch.randn(FUSED_TOKENS, 272).half()))
    made = ArrangedInput(like, order, torch.empty(order.work_bytes, dtype=torch.uint8))
    assert arranged_product(op, made, NO_EPILOGUE).shape == (2, FUSED_TOKENS // 2, 272)
    assert "bcqGemm" in recorder.functions
    other = ArrangedInput(like, InputOrder(order.weight_bits + 1, order.tile_tokens, order.work_bytes), made.memory)
    with pytest.raises(KernelError, match="cannot be multiplied by a product of"):
        arranged_product(op, other, NO_EPILOGUE)
    with pytest.raises(KernelError, match="rows in the order"):
        arranged_product(prepared(x[:1, :1]), made, NO_EPILOGUE)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "columns"), ROWS)
def test_norms_in_order_have_the_bits_of_norms_put_in_order(
    tokens: int, columns: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeroed(monkeypatch)
    x, weight, bias = (torch.randn(*size, columns, device=CUDA).to(dtype) for size in ((tokens,), (), ()))
    for tile_tokens, parameters in pairs((16, 256), ((weight, None), (weight, bias))):
        order, centered = order_for(tokens, columns, bits, tile_tokens), parameters[1] is not None
        made = arranged_norm(x, parameters, EPSILON, order, centered=centered)
        assert torch.equal(made.memory, put_in_order(norm(x, *parameters, EPSILON, centered=centered), order))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize(("tokens", "columns"), ROWS)
def test_gated_activations_in_order_have_the_bits_of_those_put_in_order(
    tokens: int, columns: int, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeroed(monkeypatch)
    gate, up = torch.randn(tokens, 2 * columns, device=CUDA).to(dtype).chunk(2, dim=-1)
    for tile_tokens, activation in pairs((16, 256), ("silu", "gelu_tanh")):
        order = order_for(tokens, columns, bits, tile_tokens)
        made = arranged_gated(gate, up, activation, order)
        assert torch.equal(made.memory, put_in_order(gated(gate, up, activation), order))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", TYPES, ids=TYPE_IDS)
def test_products_of_rows_in_order_have_the_bits_of_others(dtype: torch.dtype) -> None:
    x, weight = torch.randn(2, FUSED_TOKENS // 2, 1096, device=CUDA).to(dtype), torch.randn(1096, device=CUDA).to(dtype)
    residual = torch.randn(2, FUSED_TOKENS // 2, 272, device=CUDA).to(dtype)
    epilogues: list[Callable[[], Epilogue]] = [Epilogue, lambda: Epilogue(residual=residual)]
    for epilogue in (make() for make in epilogues):
        op = prepared(x)
        order = input_order(op, epilogue)
        assert order is not None
        rows = arranged_norm(x, (weight, None), EPSILON, order, centered=False)
        expected = bcq_linear_with_epilogue(op._replace(x=norm(x, weight, None, EPSILON, centered=False)), epilogue)
        assert torch.equal(arranged_product(op, rows, epilogue), expected)
        assert torch.equal(arranged_product(op, rows, epilogue), expected)  # the counts are zeros again
