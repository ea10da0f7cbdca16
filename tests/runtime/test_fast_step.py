"""The replacement of a model's small kernels: what it puts in, and that it leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.runtime.fast_step import fast_step
from quantkit.runtime.generation import next_logits, start, step

LOGITS_RTOL = 5e-3  # two fp16 blocks, rounded in other places


def test_the_cpu_runs_the_models_own_code(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    session = start(model, torch.tensor([[1, 2, 3]]), 8)
    with fast_step(model, session.cache, session.position, session.parts):
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_logits_agree_with_the_models_own_code(family: str, tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).half().cuda().eval()
    ids = torch.randint(5, 50, (1, 9), device="cuda")
    fast, plain = start(model, ids, 32), start(model, ids, 32)
    before = model.config._attn_implementation
    for _ in range(3):
        expected = next_logits(plain, fast=False)
        assert (next_logits(fast) - expected).norm() < LOGITS_RTOL * expected.norm()
        for session in (fast, plain):
            session.token.copy_(expected.argmax(-1, keepdim=True))
            session.position.add_(1)
    for used, untouched in zip(fast.cache.layers, plain.cache.layers, strict=True):
        assert used.cumulative_length == untouched.cumulative_length == 12
    assert model.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any("update" in vars(layer) for layer in fast.cache.layers)


@pytest.mark.cuda
def test_a_failure_inside_puts_the_model_back(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("opt")).half().cuda().eval()
    session = start(model, torch.randint(5, 50, (1, 9), device="cuda"), 32)
    with pytest.raises(ValueError, match="inside"), fast_step(model, session.cache, session.position, session.parts):
        raise ValueError("inside")
    assert not any("forward" in vars(module) for module in model.modules())
    step(session)
