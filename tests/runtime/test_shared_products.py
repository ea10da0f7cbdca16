"""Linears of one input as one product in the model's own code: equal results, and who multiplies alone."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import LINEARS
from quantkit.runtime.shared_products import share_products
from tests.runtime.test_merged_linears import RTOL, groups, llama, packed

TOKENS = 5
ALONE = [(64, 64), (32, 64), (32, 64)]
"""q, k and v of ``llama``, each by itself."""
TOGETHER = [(128, 64)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes of the products that have run."""
    run: list[tuple[int, int]] = []
    row = LINEARS["bcq"]

    def counted(forward: Any) -> Any:
        def forward_and_note(spec: Any, held: Any, shape: tuple[int, int], *rest: Any) -> Tensor:
            run.append(shape)
            y: Tensor = forward(spec, held, shape, *rest)
            return y

        return forward_and_note

    names = "prepared_forward", "epilogue_forward"
    monkeypatch.setitem(LINEARS, "bcq", replace(row, **{name: counted(getattr(row, name)) for name in names}))
    return run


@pytest.fixture
def model() -> nn.Module:
    """Two blocks of ``bcq`` Linears in the kernels' order, not shared yet."""
    made = llama().eval()
    packed(made, "bcq-w3-g32")
    return made


def attention(model: nn.Module) -> list[Any]:
    """q, k and v of the first block."""
    return groups(model)[0]


@torch.no_grad()
def outputs(modules: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    return [module(x) for module in modules]


@torch.no_grad()
def test_a_shared_model_gives_the_same_logits_in_fewer_products(
    model: nn.Module, products: list[tuple[int, int]]
) -> None:
    ids = torch.arange(TOKENS)[None]
    expected = model(ids).logits
    assert len(products) == 2 * 7
    share_products(model)
    products.clear()
    torch.testing.assert_close(model(ids).logits, expected, rtol=RTOL, atol=RTOL)
    assert products == 2 * [(128, 64), (64, 64), (192, 64), (64, 96)]


def test_every_input_is_multiplied_anew_and_nothing_of_it_is_kept(
    model: nn.Module, products: list[tuple[int, int]]
) -> None:
    share_products(model)
    modules = attention(model)
    for _ in range(2):
        x = torch.randn(1, TOKENS, 64)
        expected = [module.multiply(x) for module in modules]
        products.clear()
        for found, wanted in zip(outputs(modules, x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=RTOL, atol=RTOL)
        assert products == TOGETHER
    gone = weakref.ref(x)
    del x
    assert gone() is None


def test_linears_that_are_handed_other_tensors_multiply_alone(
    model: nn.Module, products: list[tuple[int, int]]
) -> None:
    share_products(model)
    q, k, _ = attention(model)
    x, other = torch.randn(2, 1, TOKENS, 64)
    outputs([q], x)
    products.clear()
    (found,) = outputs([k], other)
    assert products == [ALONE[1]]
    torch.testing.assert_close(found, k.multiply(other), rtol=RTOL, atol=RTOL)


def test_an_input_that_changed_in_place_is_multiplied_again(model: nn.Module) -> None:
    share_products(model)
    q, k, _ = attention(model)
    x = torch.randn(1, TOKENS, 64)
    outputs([q], x)
    x.mul_(2)
    (found,) = outputs([k], x)
    torch.testing.assert_close(found, k.multiply(x), rtol=RTOL, atol=RTOL)


def test_an_output_is_taken_once(model: nn.Module, products: list[tuple[int, int]]) -> None:
    share_products(model)
    q, k, _ = attention(model)
    x = torch.randn(1, TOKENS, 64)
    first, second = outputs([q, k, k], x)[1:]
    torch.testing.assert_close(first, second, rtol=RTOL, atol=RTOL)
    assert products == [*TOGETHER, ALONE[1]]


def test_inputs_whose_versions_nobody_counts_are_multiplied_one_by_one(
    model: nn.Module, products: list[tuple[int, int]]
) -> None:
    share_products(model)
    with torch.inference_mode():
        outputs(attention(model), torch.randn(1, TOKENS, 64))
    assert products == ALONE


def test_linears_whose_tensors_were_replaced_multiply_alone(model: nn.Module) -> None:
    share_products(model)
    _, k, _ = modules = attention(model)
    x = torch.randn(1, TOKENS, 64)
    for name, tensor in k.held.items():
        k.register_parameter(name, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    found = outputs(modules, x)
    assert not found[1].any()
    assert found[0].any()


def test_moving_and_loading_leave_no_product_of_old_tensors(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    other = llama().eval()
    packed(other, "bcq-w3-g32")
    share_products(model)
    model.load_state_dict(other.state_dict())
    assert all(module.shared is None for module in attention(model))
    x = torch.randn(1, TOKENS, 64)
    for found, wanted in zip(outputs(attention(model), x), outputs(attention(other), x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=RTOL, atol=RTOL)
    monkeypatch.setattr(QuantizedLinear, "prepare_for_device", lambda _module: None)  # which undoes the order on a CPU
    share_products(model)
    model._apply(torch.clone)
    assert all(module.shared is None for module in attention(model))
    share_products(model)
    model._apply(lambda tensor: tensor)  # as .to() of where it is
    assert all(module.shared is not None for module in attention(model))


def test_sharing_again_keeps_what_is_shared_and_shares_what_moved(model: nn.Module) -> None:
    share_products(model)
    first, second = attention(model), groups(model)[1]
    before = [module.shared for module in (*first, *second)]
    moved: Any = second[0]
    for name, tensor in moved.held.items():
        moved.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
    share_products(model)
    after = [module.shared for module in (*first, *second)]
    assert all(one is other for one, other in zip(after[:3], before[:3], strict=True))
    assert not any(one is other for one, other in zip(after[3:], before[3:], strict=True))
    x = torch.randn(1, TOKENS, 64)
    for module, found in zip(second, outputs(second, x), strict=True):
        torch.testing.assert_close(found, module.multiply(x), rtol=RTOL, atol=RTOL)


def test_copies_and_pickles_share_nothing(model: nn.Module) -> None:
    share_products(model)
    x = torch.randn(1, TOKENS, 64)
    expected = outputs(attention(model), x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(module.shared is None for module in attention(other))
        for found, wanted in zip(outputs(attention(other), x), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=RTOL, atol=RTOL)


def test_watched_linears_and_those_in_no_order_keep_their_products(model: nn.Module) -> None:
    attention(model)[1].register_forward_hook(lambda *_: None)
    gate: Any = groups(model)[1][0]
    gate.restore()
    share_products(model)
    first, second, *others = groups(model)
    assert all(module.shared is None for module in (*first, *second))
    assert all(module.shared is not None for group in others for module in group)


def test_a_model_without_described_blocks_is_left_as_it_is(model: nn.Module) -> None:
    share_products(nn.Sequential(nn.Linear(4, 4)))
    share_products(model.get_submodule("model"))  # its config names a family, whose blocks stand elsewhere


def test_threads_that_run_one_model_do_not_disturb_each_other(model: nn.Module) -> None:
    ids = [torch.full((1, TOKENS), number) for number in range(8)]
    with torch.no_grad():
        expected = [model(each).logits for each in ids]
        share_products(model)

        def run(each: Tensor) -> Tensor:
            with torch.no_grad():  # of this thread
                return model(each).logits

        with ThreadPoolExecutor(len(ids)) as pool:
            found = list(pool.map(run, ids * 20))
    for one, wanted in zip(found, expected * 20, strict=True):
        torch.testing.assert_close(one, wanted, rtol=RTOL, atol=RTOL)
