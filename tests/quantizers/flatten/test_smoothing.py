from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit.methods import LayerPlan
from quantkit.models.families import block_linears, linear_shape
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.quantizers.flatten.smoothing import bounded_scale, fold_smoothing, sigmoid_scale, smoothquant_scale

FP32_RTOL = 1e-6  # one rounding
FP32_ATOL = 2e-4  # two blocks of fp32 after scales of 1e-2 .. 1e2

# Linears of one block that each family's norms and linears feed.
FOLDED = {
    "llama": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"},
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"},
    "bloom": {"query_key_value", "dense_h_to_4h"},
    "gpt2": {"c_attn", "c_fc"},
}
NORM_FED = {
    "llama": {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"},
    "opt": {"q_proj", "k_proj", "v_proj", "fc1"},
    "bloom": FOLDED["bloom"],
    "gpt2": FOLDED["gpt2"],
}


def test_sigmoid_scale_worked_by_hand() -> None:
    # Maxima 1 and 3: mean 2, deviation 1, z = -1 and 1; both operands alike, so alpha decides nothing but the ratio.
    scale = sigmoid_scale(torch.tensor([1.0, 3.0]), torch.tensor([30.0, 10.0]), 0.5)
    low, high = 1 / (1 + torch.e), torch.e / (1 + torch.e)
    torch.testing.assert_close(scale, torch.tensor([(low / high) ** 0.5, (high / low) ** 0.5]))


def test_sigmoid_scale_of_equal_channels_is_one() -> None:
    assert sigmoid_scale(torch.full((4,), 7.0), torch.full((4,), 0.1), 0.5).tolist() == [1, 1, 1, 1]


def test_sigmoid_scale_knows_no_units() -> None:
    acts, weights = torch.rand(9), torch.rand(9)
    torch.testing.assert_close(sigmoid_scale(acts * 50, weights * 0.01, 0.3), sigmoid_scale(acts, weights, 0.3))


def test_smoothquant_scale_worked_by_hand_and_safe_for_dead_channels() -> None:
    scale = smoothquant_scale(torch.tensor([16.0, 0.0]), torch.tensor([4.0, 0.0]), 0.5)
    assert scale[0] == 2
    assert scale[1] > 0


def _fold(folder: Path, settings: FlattenSettings) -> tuple[float, set[str]]:
    """(largest change of the logits, last parts of the folded layers' names) under random channel maxima."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(24).reshape(2, 12) + 5
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases are 1 and 0 in a fresh model
            if "norm" in name or "ln_" in name or "bias" in name:
                parameter.add_(torch.rand_like(parameter))
        before = model(ids).logits
    linears = block_linears(model)
    stats = {name: SimpleNamespace(absmax=torch.rand(linear_shape(m)[1]) ** 6 * 100) for name, m in linears.items()}
    plans = {name: LayerPlan("flatten", settings) for name in linears}
    done = fold_smoothing(model, plans, SimpleNamespace(layers=stats))
    with torch.no_grad():
        change = (model(ids).logits - before).abs().max().item()
    return change, {name.rsplit(".", 1)[1] for name in done.folded_scales}


@pytest.mark.parametrize("family", FOLDED)
@pytest.mark.parametrize("smoothing", ["sigmoid", "smoothquant"])
def test_folding_preserves_the_model(tiny_model: Callable[[str], Path], family: str, smoothing: str) -> None:
    change, folded = _fold(tiny_model(family), FlattenSettings(smoothing=smoothing))
    assert change < FP32_ATOL
    assert folded == FOLDED[family]


@pytest.mark.parametrize("family", FOLDED)
def test_bounded_folding_preserves_the_model(tiny_model: Callable[[str], Path], family: str) -> None:
    change, folded = _fold(tiny_model(family), FlattenSettings(smoothing="smoothquant", bound_linears=True))
    assert change < FP32_ATOL
    assert folded == FOLDED[family]


def test_a_bounded_scale_never_raises_the_largest_weight_of_the_feeding_linear() -> None:
    scale, source = (
        torch.tensor([1e-3, 0.5, 1.0, 2.0, 40.0]),
        torch.tensor([[0.8, 0.1], [1.0, 0], [0.3, 0], [1, 1], [0, 0]]),
    )
    bounded = bounded_scale(scale, source)
    assert (source / bounded[:, None]).abs().max() <= source.abs().max() * (1 + FP32_RTOL)
    assert torch.equal(bounded[2:], scale[2:])  # their median is 1 already


@pytest.mark.parametrize("family", NORM_FED)
def test_folding_can_be_kept_to_norms(tiny_model: Callable[[str], Path], family: str) -> None:
    change, folded = _fold(tiny_model(family), FlattenSettings(smooth_linears=False))
    assert change < FP32_ATOL
    assert folded == NORM_FED[family]


def test_nothing_is_folded_without_smoothing(tiny_model: Callable[[str], Path]) -> None:
    assert _fold(tiny_model("llama"), FlattenSettings(smoothing="none")) == (0.0, set())


def test_a_feed_with_an_unplanned_target_is_left_alone(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float32)
    linears = block_linears(model)
    stats = {name: SimpleNamespace(absmax=torch.rand(linear_shape(m)[1])) for name, m in linears.items()}
    plans = {name: LayerPlan("flatten", FlattenSettings()) for name in linears if not name.endswith("k_proj")}
    folded = fold_smoothing(model, plans, SimpleNamespace(layers=stats)).folded_scales
    assert {name.rsplit(".", 1)[1] for name in folded} == {"gate_proj", "up_proj", "down_proj"}
