"""Bound products: what reaches the driver is what the usual way hands it, and the results are the same bit for bit."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quantkit.cuda import driver, launch, tensor_map
from quantkit.cuda.architectures import ARCHITECTURES
from quantkit.cuda.compile import CompileUnit
from quantkit.cuda.driver import LoadedKernel
from quantkit.cuda.parameters import kernel_parameters
from quantkit.cuda.tensor_map import MAP_BYTES
from quantkit.errors import KernelError
from quantkit.ops.bcq import autotune, bound
from quantkit.ops.bcq import op as bcq_op
from quantkit.ops.bcq.op import BcqLinearPrepared, bcq_linear_prepared, bcq_linear_with_epilogue
from quantkit.ops.bcq.order import Order
from quantkit.ops.epilogue import Epilogue, apply_epilogue
from tests.ops.bcq.cases import random_weight
from tests.ops.launches import record

CUDA = torch.device("cuda")
N, K, GROUP = 1040, 2560, 128
TOKENS = (1, 2, 5, 16, 40, 70, 200)
SCRATCH = {"y", "partials", "ready"}  # memory of one call
Call = tuple[str, dict[str, object], tuple[int, ...]]  # a kernel, its parameters by name, its sizes


def _op(x: Tensor, order: Order, bias: Tensor | None = None, *, bits: int = 4) -> BcqLinearPrepared:
    weight = random_weight(bits, N, K, GROUP, offset=True, equal_steps=order == Order.GRID).to(x.device).tiled(order)
    return BcqLinearPrepared(x, weight.tiles, weight.scale_tiles, bias, N, GROUP, weights_ready=True, order=order.value)


class Driver:
    """Keeps what kernels are queued with: their function, their parameters by name, their grid."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.kernels: dict[int, tuple[str, LoadedKernel]] = {}

    def load(self, unit: CompileUnit) -> LoadedKernel:
        number = len(self.kernels) + 1
        kernel = LoadedKernel(SimpleNamespace(ptr=number), kernel_parameters(unit.source, unit.function))
        self.kernels[number] = unit.expression, kernel
        return kernel

    def cuLaunchKernelEx(self, config: int, function: int, pointers: int, extra: None) -> int:
        name, kernel = self.kernels[function]
        places = (ctypes.c_void_p * len(kernel.parameters)).from_address(pointers)
        values = {
            parameter.name: struct.unpack(parameter.code, ctypes.string_at(at, struct.calcsize(parameter.code)))[0]
            for parameter, at in zip(kernel.parameters, places, strict=True)
        }
        read = driver._Config.from_address(config)
        self.calls.append(
            (name, values, (read.grid_x, read.grid_y, read.block_x, read.shared_mem, read.attribute_count))
        )
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made, run, fixed = Driver(), launch.Launch.run, launch.Launch.fixed
    record(monkeypatch, ARCHITECTURES[9, 0])
    monkeypatch.setattr(launch.Launch, "run", run)
    monkeypatch.setattr(launch.Launch, "fixed", fixed)
    monkeypatch.setattr(launch, "_load", cache(lambda unit, index: (made.load(unit), True)))
    monkeypatch.setattr(driver, "_library", lambda: made)
    for module in (tensor_map, bound):
        monkeypatch.setattr(module, "encoded_map", lambda *matrix: repr(matrix).encode()[:MAP_BYTES].ljust(MAP_BYTES))
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    autotune.read_table_again()
    yield made
    autotune.read_table_again()


@pytest.mark.parametrize("order", Order)
def test_the_driver_gets_what_it_gets_in_the_usual_way(machine: Driver, order: Order) -> None:
    launches = set()
    for tokens in TOKENS:
        op = _op(torch.randn(tokens, K).half(), order, torch.randn(N).half() if tokens % 2 else None)
        first = _calls(machine, lambda op=op: bound.bound_product(op))
        usual = _calls(machine, lambda op=op: bcq_op._product(op.x, op.weight, op.bias, weights_ready=True))
        again = _calls(machine, lambda op=op: bound.bound_product(op))
        launches.add(len(usual))
        assert _without_scratch(first) == _without_scratch(usual) == _without_scratch(again)
        for calls in (first, again):
            if len(calls) > 1:  # what puts x in order, and what reads it there
                assert calls[0][1]["x"] == op.x.data_ptr()
                assert calls[0][1]["arranged"] == calls[1][1]["x"] != op.x.data_ptr()
    assert launches == ({1, 2} if order == Order.PLANES else {1})


@pytest.mark.parametrize("order", Order)
def test_epilogues_are_bound_too(machine: Driver, order: Order) -> None:
    for tokens in TOKENS:
        op = _op(torch.randn(tokens, K).half(), order)
        for activation, adds in (("relu", False), (None, True), ("silu", True)):
            residuals = [torch.randn(tokens, N).half() if adds else None for _ in range(2)]
            for residual in residuals:
                epilogue = Epilogue(activation, residual)
                got = _calls(machine, lambda op=op, it=epilogue: bound.bound_product(op, it))
                usual = _calls(
                    machine,
                    lambda op=op, it=epilogue: bcq_op._product(
                        op.x, op.weight, op.bias, weights_ready=True, epilogue=it
                    ),
                )
                assert _without_scratch(got) == _without_scratch(usual)
                assert got[-1][1]["residual"] == (0 if residual is None else residual.data_ptr())


def test_a_residual_of_another_kind_is_refused_when_bound(machine: Driver) -> None:
    op = _op(torch.randn(4, K).half(), Order.CODES)
    bound.bound_product(op, Epilogue(residual=torch.zeros(4, N).half()))
    with pytest.raises(KernelError, match="cannot be added"):
        bound.bound_product(op, Epilogue(residual=torch.zeros(3, N).half()))
    assert len(machine.calls) == 1


def _calls(machine: Driver, run: Callable[[], object]) -> list[Call]:
    before = len(machine.calls)
    assert run() is not None
    return machine.calls[before:]


def _without_scratch(calls: list[Call]) -> list[Call]:
    scratch = SCRATCH | ({"arranged"} if len(calls) > 1 else set())
    kept = []
    for place, (name, values, sizes) in enumerate(calls):
        of_work = scratch | ({"x"} if place else set())
        kept.append((name, {key: value for key, value in values.items() if key not in of_work}, sizes))
    return kept


def test_another_x_goes_in_by_its_own_address(machine: Driver) -> None:
    for order, tokens in ((Order.CODES, 4), (Order.GRID, 70)):
        op = _op(torch.randn(tokens, K).half(), order)
        other = op._replace(x=torch.randn(1, tokens, K).half())
        results = [bound.bound_product(each) for each in (op, other)]
        first, second = (values for _, values, _ in machine.calls[-2:])
        differing = {name for name in first if first[name] != second[name]}
        assert {"x", "xMap"} & differing
        assert differing <= {"x", "xMap", *SCRATCH}
        assert [result.shape for result in results if result is not None] == [(tokens, N), (1, tokens, N)]
        for values, result in zip((first, second), results, strict=True):
            assert result is not None
            assert values["y"] == result.data_ptr()


def test_weights_of_other_sizes_at_the_same_addresses_are_told_apart(machine: Driver) -> None:
    op = _op(torch.randn(4, K).half(), Order.CODES)
    bound.bound_product(op)
    fewer = op._replace(tiles=op.tiles[:, :, :3], scale_tiles=op.scale_tiles[..., :4, :])
    assert fewer.tiles.data_ptr() == op.tiles.data_ptr()
    bound.bound_product(fewer)
    assert machine.calls[0][0] != machine.calls[1][0]


def test_what_needs_a_copy_goes_the_usual_way(machine: Driver) -> None:
    memory = torch.randn(5 * K + 1).half()
    op = _op(memory[1:].view(5, K), Order.CODES)
    assert bound.bound_product(op) is None
    assert bound.bound_product(op._replace(x=memory[: 5 * K].view(K, 5).t())) is None
    assert bound.bound_product(op._replace(x=memory[:0].view(0, K))) is None
    assert bound.bound_product(op._replace(x=memory[: 5 * K].view(5, K), bias=torch.zeros(N))) is None
    assert not machine.calls


def test_a_new_table_makes_the_choice_anew(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    op = _op(torch.randn(8, K).half(), Order.CODES)
    bound.bound_product(op)
    monkeypatch.setattr(bound, "choose", lambda *given, **named: "bcq_gemm_wgmma")
    bound.bound_product(op)
    autotune.read_table_again()
    bound.bound_product(op)
    assert [name.split("<")[0] for name, _, _ in machine.calls] == ["bcqLevelGemv", "bcqLevelGemv", "bcqGemm"]


def test_the_memory_for_products_is_bounded(machine: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "MOST_FIXED", 3)
    op = _op(torch.randn(8, K).half(), Order.CODES)
    for tokens in (1, 2, 3, 4, 5):
        bound.bound_product(op._replace(x=op.x[:tokens]))
    assert 0 < len(bound._products) <= 3
    assert len(machine.calls) == 5


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", Order)
def test_results_are_those_of_the_usual_way(order: Order, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        op = _op(torch.randn(tokens, K, device=CUDA).to(dtype), order, torch.randn(N, device=CUDA).to(dtype))
        for x in (
            op.x,
            torch.randn(tokens, K, device=CUDA).to(dtype),
            torch.randn(1, tokens, K, device=CUDA).to(dtype),
        ):
            expected = bcq_op._product(x, op.weight, op.bias, weights_ready=True)
            residual = torch.randn_like(expected)
            for _ in range(3):
                assert torch.equal(bcq_linear_prepared(*op._replace(x=x)), expected), tokens
                for epilogue in (Epilogue("relu"), Epilogue(residual=residual), Epilogue("relu", residual)):
                    got = bcq_linear_with_epilogue(op._replace(x=x), epilogue)
                    assert torch.equal(got, apply_epilogue(expected, epilogue)), tokens


@pytest.mark.cuda
@pytest.mark.parametrize("tokens", [4, 40])
def test_graphs_and_streams_take_bound_products(tokens: int) -> None:
    op = _op(torch.randn(tokens, K, device=CUDA).half(), Order.CODES)
    expected = bcq_linear_prepared(*op)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [bcq_linear_prepared(*op) for _ in range(3)]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        graph.replay()
        with torch.cuda.stream(stream):
            beside = bcq_linear_prepared(*op)
    torch.cuda.synchronize()
    assert all(torch.equal(y, expected) for y in (*captured, beside))
