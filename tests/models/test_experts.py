"""Fused experts and separate ones compute the same, under the hub's names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantkit.models.experts import BatchedExperts, RoutedExperts, expert_linears, hub_names, routers, separate_experts
from quantkit.models.families import block_linears, decoder_blocks
from tests.tiny import EXPERTS, VOCABULARY, build_model

LOGIT_ATOL = 1e-4  # fp32 sums over the chosen experts in another order, two blocks deep
WIDE_LINEARS = 9  # tiny experts have at most eight experts


def build(family: str) -> nn.Module:
    """A tiny model whose biases and routers are no zeros."""
    model = build_model(family).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("family", EXPERTS)
def test_separate_experts_compute_what_the_fused_ones_did(family: str) -> None:
    model, ids = build(family), torch.randint(0, VOCABULARY, (2, 20))
    with torch.no_grad():
        fused = model(ids).logits
        separate_experts(model)
        torch.testing.assert_close(model(ids).logits, fused, atol=LOGIT_ATOL, rtol=0)
    assert not any(parameter.ndim > 2 for parameter in model.parameters())


@pytest.mark.parametrize("family", EXPERTS)
def test_all_linears_but_routers_are_found_in_the_blocks(family: str) -> None:
    model = build(family)
    blocks = [name for name, _ in decoder_blocks(model)]
    separate_experts(model)
    assert [name for name, _ in decoder_blocks(model)] == blocks  # the experts are no stack of blocks
    linears, experts = block_linears(model), expert_linears(model)
    assert experts
    assert experts.keys() <= linears.keys()
    assert not routers(model) & linears.keys()
    left = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in linears]
    assert all(model.get_submodule(name).out_features < WIDE_LINEARS for name in left if name != "lm_head")


def test_separating_twice_changes_nothing() -> None:
    model = build("qwen3_moe")
    separate_experts(model)
    modules = dict(model.named_modules())
    separate_experts(model)
    assert dict(model.named_modules()) == modules


def test_names_are_those_that_transformers_merges() -> None:
    assert hub_names(build("mixtral")) == {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    assert hub_names(build("deepseek_v3"))["gate_up_proj"] == ("gate_proj", "up_proj")
    assert hub_names(build("gpt_oss")) == {}  # whose hub files are fused as well


def _first(family: str) -> nn.Module:
    model = build(family)
    separate_experts(model)
    return next(module for module in model.modules() if isinstance(module, RoutedExperts | BatchedExperts))


def test_an_expert_runs_on_its_own_tokens_alone() -> None:
    experts, x = _first("mixtral"), torch.randn(5, 64)
    chosen = torch.tensor([[0, 2], [2, 0], [2, 3], [0, 3], [2, 0]])
    seen = {}
    for index in range(4):
        linear = experts.get_submodule(f"{index}.w1")
        linear.register_forward_pre_hook(lambda _, args, index=index: seen.update({index: args[0]}))
    experts(x, chosen, torch.rand(5, 2))
    assert {index: len(own) for index, own in seen.items()} == {0: 4, 2: 4, 3: 2}
    assert torch.equal(seen[3], x[2:4])


def test_a_choice_of_no_expert_adds_nothing() -> None:
    experts, x = _first("mixtral"), torch.randn(3, 64)
    beyond, weights = torch.tensor([[1, 4], [4, 4], [4, 1]]), torch.rand(3, 2)
    with torch.no_grad():
        y, alone = experts(x, beyond, weights), experts.run(1, x[[0, 2]])
    assert torch.equal(y[1], torch.zeros(64))
    torch.testing.assert_close(y[[0, 2]], alone * torch.stack([weights[0, 0], weights[2, 1]])[:, None])


def test_batched_experts_skip_the_tokens_of_others() -> None:
    experts = _first("llama4")
    x = torch.zeros(4, 3, 64)
    x[2, 1], x[0, 0] = torch.randn(64), torch.randn(64)
    counts = {}
    for index in range(4):
        linear = experts.get_submodule(f"{index}.gate_proj")
        linear.register_forward_pre_hook(lambda _, args, index=index: counts.update({index: len(args[0])}))
    with torch.no_grad():
        y = experts(x.view(12, 64))
    assert counts == {0: 1, 2: 1}
    assert set(y.abs().sum(-1).nonzero().flatten().tolist()) == {0, 7}
