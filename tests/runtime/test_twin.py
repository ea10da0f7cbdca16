"""Twins of models: the same tensors, other functions, and nothing replaced in the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.runtime.twin import holds_watched, twin_of


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def negative(x: Tensor) -> Tensor:
    return -x


def test_a_twin_runs_other_functions_on_the_same_tensors() -> None:
    first, x = model(), torch.randn(2, 4)
    expected = first(x)
    twin = twin_of(first, {first[1][1]: negative})
    assert torch.equal(twin(x), -first[1][0](first[0](x)))
    assert torch.equal(first(x), expected)
    assert type(twin) is nn.Sequential
    assert [id(p) for p in twin.parameters()] == [id(p) for p in first.parameters()]


def test_only_what_holds_a_change_is_copied() -> None:
    first = model()
    twin = twin_of(first, {first[1][1]: negative})
    assert twin[0] is first[0]
    assert twin[1][0] is first[1][0]
    assert twin[1] is not first[1]
    assert twin_of(first, {}) is first


def test_hooks_of_a_changed_module_run_for_its_twin() -> None:
    first, seen = model(), list[Any]()
    first[1].register_forward_pre_hook(lambda module, arguments: seen.append(module))
    twin = twin_of(first, {first[1]: negative})
    twin(torch.randn(2, 4))
    assert seen == [twin[1]]
    assert "forward" not in vars(first[1])


def test_a_module_is_watched_by_hooks_and_by_forwards_that_stand_in() -> None:
    hooked, replaced, both = model(), model(), model()
    assert not holds_watched(both)
    hooked[1][0].register_forward_hook(lambda module, arguments, result: None)
    replaced[0].forward = replaced[0].forward
    assert holds_watched(hooked)
    assert holds_watched(replaced)
    both.register_forward_hook(lambda module, arguments, result: None)
    assert not holds_watched(both)
