"""Linears of one input as one product: equal results, shared memory, unchanged files, and who is left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from quantkit.bench.kernels import random_linear
from quantkit.bench.methods import method_spec
from quantkit.bench.shapes import LinearShape
from quantkit.models.families import decoder_blocks
from quantkit.runtime.merged_linears import MergedLinears, merge_linears

CPU = torch.device("cpu")
RTOL = 1e-5  # fp32 sums in another order


def llama() -> nn.Module:
    """Rows in whole tiles of 16, two key heads for four query heads."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 40}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))


def packed(model: nn.Module, method: str) -> None:
    """Every Linear of the blocks in a format, in the kernels' order."""
    for prefix, block in decoder_blocks(model):
        for name, module in list(block.named_modules()):
            if isinstance(module, nn.Linear):
                shape = LinearShape(name, module.out_features, module.in_features)
                linear = random_linear(method_spec(method), shape, CPU, torch.float32)
                linear.prepare()
                model.set_submodule(f"{prefix}.{name}", linear)


def groups(model: nn.Module) -> list[list[nn.Module]]:
    """q, k, v and gate, up of every block."""
    names = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
    return [[block.get_submodule(name) for name in group] for _, block in decoder_blocks(model) for group in names]


def merge_all(model: nn.Module) -> list[MergedLinears]:
    """The groups merged."""
    return [merge_linears(group) for group in groups(model)]


@pytest.mark.parametrize("method", [None, "bcq-w3-g32", "nuqmm-q2-g32"], ids=["float", "bcq", "no offset"])
def test_merged_products_are_those_of_the_single_linears(method: str | None) -> None:
    model = llama()
    if method is not None:
        packed(model, method)
    for modules in groups(model):
        x = torch.randn(1, 1, modules[0].in_features)
        before = [module(x) for module in modules]
        merged = merge_linears(modules)
        assert merged.product is not None
        for output, module, expected in zip(merged(x), modules, before, strict=True):
            torch.testing.assert_close(output, expected, rtol=RTOL, atol=RTOL)
            assert torch.equal(module(x), expected)


def test_biases_are_merged_too() -> None:
    linears, x = [nn.Linear(32, n) for n in (16, 48)], torch.randn(1, 1, 32)
    for output, module in zip(merge_linears(linears)(x), linears, strict=True):
        torch.testing.assert_close(output, module(x), rtol=RTOL, atol=RTOL)


def test_the_tensors_are_parts_of_one_and_merging_again_finds_them() -> None:
    linears = [nn.Linear(32, 16), nn.Linear(32, 48)]
    expected = [linear.weight.clone() for linear in linears]
    merge_linears(linears)
    places = [linear.weight.data_ptr() for linear in linears]
    merge_linears(linears)
    assert [linear.weight.data_ptr() for linear in linears] == places
    assert places[1] - places[0] == linears[0].weight.nbytes
    for linear, weight in zip(linears, expected, strict=True):
        assert type(linear.weight) is nn.Parameter
        assert linear.weight.requires_grad
        assert torch.equal(linear.weight, weight)


@pytest.mark.parametrize("method", [None, "bcq-w3-g32"], ids=["float", "bcq"])
def test_the_state_dict_is_the_same_after_merging(method: str | None) -> None:
    model = llama()
    if method is not None:
        packed(model, method)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_all(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_saved_model_is_the_same_after_merging(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_all(model)
    model.save_pretrained(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_saved_file_is_the_same_to_the_byte(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    model.save_pretrained(tmp_path / "before")
    merge_all(model)
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after"))
    assert before == after


def test_merged_linears_go_back_to_the_canonical_order_and_again_to_the_kernels() -> None:
    model, x = llama(), torch.randn(1, 1, 64)
    packed(model, "bcq-w3-g32")
    modules = groups(model)[0]
    canonical = [{name: tensor.clone() for name, tensor in module.tensors.items()} for module in modules]
    expected = merge_linears(modules)(x)
    for module, tensors in zip(modules, canonical, strict=True):
        module.restore()
        assert all(torch.equal(module.held[name], tensor) for name, tensor in tensors.items())
        module.prepare()
    assert all(map(torch.equal, merge_linears(modules)(x), expected))


def test_tensors_that_moved_are_merged_again() -> None:
    model = llama()
    merge_all(model)
    model.double()
    x = torch.randn(1, 1, 64).double()
    merged = merge_all(model)[0]
    for output, module in zip(merged(x), merged.modules, strict=True):
        torch.testing.assert_close(output, module(x))


def test_linears_that_differ_stay_apart() -> None:
    model, mixed = llama(), llama()
    packed(model, "bcq-w3-g32")
    packed(mixed, "bcq-w2-g32")
    for (_, block), (_, other) in zip(decoder_blocks(model), decoder_blocks(mixed), strict=True):
        block.self_attn.k_proj = other.self_attn.k_proj
    merged, x = merge_all(model), torch.randn(1, 1, 64)
    assert [group.product is not None for group in merged] == [False, True] * 2
    assert all(torch.equal(y, module(x)) for y, module in zip(merged[0](x), merged[0].modules, strict=True))


def test_linears_of_the_trellis_format_run_by_themselves() -> None:
    model, x = llama(), torch.randn(1, 1, 64)
    packed(model, "trellis-w2")
    for modules in groups(model):
        merged = merge_linears(modules)
        assert merged.product is None
        assert all(torch.equal(y, module(x)) for y, module in zip(merged(x), modules, strict=True))


def test_types_and_biases_that_differ_stay_apart() -> None:
    plain = nn.Linear(32, 16)
    for other in (nn.Linear(32, 16).half(), nn.Linear(32, 16, bias=False), nn.Linear(32, 16, device="meta")):
        before = plain.weight
        assert merge_linears([plain, other]).product is None
        assert plain.weight is before


def test_a_single_linear_runs_as_it_is() -> None:
    linear, x = nn.Linear(32, 16), torch.randn(1, 1, 32)
    merged = merge_linears([linear])
    assert merged.product is None
    assert torch.equal(merged(x)[0], linear(x))
