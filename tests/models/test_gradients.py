"""Gradients led back block by block against plain autograd, and Hessians weighed by them against sums written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.models.families import block_linears, decoder_blocks
from quantkit.models.gradients import BackwardPass, sampled_loss
from quantkit.models.hessians import Weighing, block_hessians
from quantkit.models.loading import load_model
from quantkit.models.stream import ModelStream, in_memory_stream
from quantkit.models.streaming import capture_inputs
from quantkit.storage.resume import passing_workspace
from tests.tiny import VOCABULARY

FP64_RTOL = 1e-9  # the same sums in another order
FP32_RTOL = 1e-4  # products of weighed rows added up window by window
AHEAD = 3


def _windows(count: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, 24), dtype=torch.int32)


def _streamed(stream: ModelStream, windows: torch.Tensor, ahead: int) -> dict[tuple[str, int], torch.Tensor]:
    """The gradient of every Linear's output for every window."""
    found: dict[tuple[str, int], torch.Tensor] = {}

    def take(name: str, window: int, gradient: torch.Tensor) -> None:
        assert (name, window) not in found
        found[name, window] = gradient.clone()

    linears, blocks = block_linears(stream.model), len(stream.blocks)
    with passing_workspace({}) as work:
        run = BackwardPass(stream, windows, work, 0, ahead=ahead, activations=torch.float64)
        inputs = run.run_forwards(blocks)
        gradients = work.state(blocks + 1, tuple(inputs[0].hidden.shape), inputs[0].dtype)
        run.head_gradients(inputs.pop(), gradients)
        for index in reversed(range(blocks)):
            own = {name: module for name, module in linears.items() if stream.owner(name) == stream.blocks[index][0]}
            run.block_gradients(index, inputs.pop(), gradients, gradients, (own, take))
    return found


def _by_autograd(model: Any, windows: torch.Tensor, ahead: int) -> dict[tuple[str, int], torch.Tensor]:
    found: dict[tuple[str, int], torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in block_linears(model).items():

        def keep(_module: nn.Module, _arguments: Any, output: torch.Tensor, name: str = name) -> None:
            output.retain_grad()
            outputs[name] = output

        handles.append(module.register_forward_hook(keep))
    for number, window in enumerate(windows):
        logits = model(window[None].long(), use_cache=False).logits[0]
        sampled_loss(logits[ahead:], number).backward()
        for name, output in outputs.items():
            assert output.grad is not None
            found[name, number] = output.grad.reshape(-1, output.shape[-1]).clone()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("ahead", [0, AHEAD], ids=["all_tokens", "behind_a_prefix"])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_gradients_by_blocks_equal_plain_autograd(family: str, ahead: int, tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model(family)), dtype=torch.float64)
    windows = _windows()
    streamed = _streamed(in_memory_stream(model), windows, ahead)
    expected = _by_autograd(model, windows, ahead)
    assert streamed.keys() == expected.keys()
    for key, gradient in expected.items():
        # fp32 is what the loss is taken in, by both
        torch.testing.assert_close(streamed[key], gradient, rtol=FP64_RTOL, atol=FP64_RTOL)
        assert bool(gradient.any())


def test_the_tokens_drawn_for_a_window_do_not_depend_on_the_others() -> None:
    logits = torch.randn(40, 12)
    first = sampled_loss(logits, 5)
    sampled_loss(logits, 4)
    assert torch.equal(sampled_loss(logits, 5), first)
    assert not torch.equal(sampled_loss(logits, 6), first)


@pytest.mark.parametrize("family", ["llama", "gpt2"], ids=["linear", "conv1d"])
def test_weighed_hessians_are_the_sums_written_out(family: str, tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model(family)))
    windows, groups = _windows(), 3
    prefix, block = decoder_blocks(model)[0]
    linears = {name: module for name, module in block_linears(model).items() if name.startswith(f"{prefix}.")}
    weighed = list(linears)[1:]  # the first keeps its own, though it shares its input with others
    saliency = {name: torch.rand(*windows.shape, groups).square().to(torch.bfloat16) for name in weighed}
    inputs = capture_inputs(in_memory_stream(model), windows)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    for name, module in linears.items():
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].reshape(-1, args[0].shape[-1]))
        )
    found = block_hessians(block, inputs, 0, linears, Weighing(saliency=saliency))
    for name in linears:
        x = torch.cat(seen[name]).double()
        if name not in weighed:
            assert found[name].shape == (x.shape[1], x.shape[1])
            torch.testing.assert_close(found[name].double(), x.t() @ x / len(x), rtol=FP32_RTOL, atol=1e-6)
            continue
        assert found[name].shape == (groups, x.shape[1], x.shape[1])
        for number, hessian in enumerate(found[name]):
            weights = saliency[name].double().reshape(-1, groups)[:, number]
            expected = sum(w * torch.outer(row, row) for w, row in zip(weights, x, strict=True)) / weights.sum()
            torch.testing.assert_close(hessian.double(), expected, rtol=FP32_RTOL, atol=1e-6)


def test_a_hessian_of_tokens_without_weight_is_zero(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("opt")))
    windows = _windows(1)
    prefix, block = decoder_blocks(model)[0]
    name = f"{prefix}.fc1"
    weighing = Weighing(saliency={name: torch.zeros(*windows.shape, 1)})
    inputs = capture_inputs(in_memory_stream(model), windows)
    found = block_hessians(block, inputs, 0, {name: model.get_submodule(name)}, weighing)[name]
    assert not found.any()
