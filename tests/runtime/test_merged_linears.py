"""Linears of one input as one product: equal results, shared memory, and who is left out."""

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
from quantkit.runtime.merged_linears import _whole, join_siblings

LLAMA_SIBLINGS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
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


@pytest.mark.parametrize("method", [None, "bcq-w3-g32", "nuqmm-q2-g32"], ids=["float", "bcq", "no offset"])
def test_joined_products_are_those_of_the_single_linears(method: str | None) -> None:
    model = llama()
    if method is not None:
        packed(model, method)
    blocks = decoder_blocks(model)
    joined = join_siblings(model)
    assert len(joined) == len(blocks) * len(LLAMA_SIBLINGS)
    for group in joined:
        x = torch.randn(1, 1, group.modules[0].in_features)
        for module, forward in group.forwards():
            torch.testing.assert_close(forward(x), module(x), rtol=RTOL, atol=RTOL)


def test_joining_again_finds_the_tensors_joined() -> None:
    first, second = nn.Linear(32, 16), nn.Linear(32, 48)
    expected = [first.weight.clone(), second.weight.clone()]
    whole = _whole([first.weight, second.weight])
    assert _whole([first.weight, second.weight]).data_ptr() == whole.data_ptr() == first.weight.data_ptr()
    assert torch.equal(whole, torch.cat(expected))
    assert torch.equal(second.weight, expected[1])


def test_a_saved_model_is_the_same_after_joining(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    join_siblings(model)
    model.save_pretrained(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_tensors_that_moved_are_joined_again() -> None:
    model = llama()
    first = join_siblings(model)
    assert join_siblings(model) is first
    model.double()
    again = join_siblings(model)
    assert again is not first
    x = torch.randn(1, 1, 64).double()
    (module, forward), *_ = again[0].forwards()
    torch.testing.assert_close(forward(x), module(x))


def test_a_new_input_is_multiplied_again() -> None:
    group = join_siblings(llama())[0]
    (_, query), (key_module, key), *_ = group.forwards()
    first, second = torch.randn(2, 1, 1, key_module.in_features)
    query(first)
    torch.testing.assert_close(key(second), key_module(second), rtol=RTOL, atol=RTOL)
    group.forget()
    assert group.seen is None


def test_linears_that_differ_stay_apart() -> None:
    model, mixed = llama(), llama()
    packed(model, "bcq-w3-g32")
    packed(mixed, "bcq-w2-g32")
    for (_, block), (_, other) in zip(decoder_blocks(model), decoder_blocks(mixed), strict=True):
        block.self_attn.k_proj = other.self_attn.k_proj
    assert len(join_siblings(model)) == len(decoder_blocks(model))  # gate and up only
