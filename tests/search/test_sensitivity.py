"""The quadratic estimate of KL against measured KL, and its pieces against sums written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.data.windows import tokenize
from quantkit.evaluation.divergence import score_logits
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.hessians import block_hessians
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.models.streaming import advance, capture_inputs
from quantkit.search.sensitivity import output_sensitivity, quadratic_error
from tests.tiny import sample_text

# The diagonal, input-independent Fisher of sampled tokens against a KL of 256 tokens: right within this factor.
ESTIMATE_FACTOR = 2.0
DISTURBANCE = 0.02  # of a weight's deviation: small enough for the second order to be all


@pytest.fixture
def windows(tiny_model: Callable[[str], Path]) -> torch.Tensor:
    _, tokenizer = load_model(str(tiny_model("llama")))
    return tokenize(tokenizer, sample_text(600), name="sample")[: 8 * 64].reshape(8, 64)


def test_quadratic_error_is_the_mean_squared_output_change() -> None:
    x, difference = torch.randn(200, 12), torch.randn(5, 12)
    expected = (x.double() @ difference.double().t()).square().mean(dim=0)
    assert torch.allclose(quadratic_error(difference, x.t() @ x / 200), expected, rtol=1e-5)  # H is fp32


@pytest.mark.parametrize("family", ["llama", "gpt2"], ids=["linear", "conv1d"])
def test_estimate_predicts_the_kl_of_a_disturbed_layer(
    family: str, tiny_model: Callable[[str], Path], windows: torch.Tensor
) -> None:
    model, _ = load_model(str(tiny_model(family)))
    linears = block_linears(model)
    names = [name for name in linears if name.endswith(("down_proj", "mlp.c_proj"))]
    gains = output_sensitivity(in_memory_stream(model), {name: linears[name] for name in names}, windows)
    for name in names:
        weight = linear_weight(linears[name]).data
        disturbance = DISTURBANCE * weight.std() * torch.randn_like(weight)
        error = quadratic_error(disturbance, _hessian(model, linears[name], name, windows))
        before = [model(window[None]).logits[0] for window in windows]
        weight += disturbance
        kl = torch.cat([score_logits(a, model(w[None]).logits[0], w).kl for a, w in zip(before, windows, strict=True)])
        weight -= disturbance
        ratio = float((gains[name] * error).sum() / 2 / kl.mean())
        assert 1 / ESTIMATE_FACTOR < ratio < ESTIMATE_FACTOR, name


def test_sensitivity_is_repeatable_and_leaves_the_model_alone(
    tiny_model: Callable[[str], Path], windows: torch.Tensor
) -> None:
    model, _ = load_model(str(tiny_model("opt")))
    linears = block_linears(model)
    first, second = (output_sensitivity(in_memory_stream(model), linears, windows) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in linears)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def _hessian(model: Any, module: Any, name: str, windows: torch.Tensor) -> torch.Tensor:
    inputs = capture_inputs(in_memory_stream(model), windows)
    index = int(name.split(".h." if ".h." in name else ".layers.")[1].split(".")[0])
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    for number in range(index):
        inputs = advance(blocks[number], inputs, number)
    return block_hessians(blocks[index], inputs, index, {name: module})[name]
