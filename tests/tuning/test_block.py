"""Tuning one block on tiny models: never worse on held-out windows, deterministic, codes left alone unless asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.errors import StatsError
from quantkit.formats.base import PackedWeight
from quantkit.models.families import block_linears, linear_bias, linear_weight
from quantkit.models.gradients import frozen
from quantkit.models.stream import in_memory_stream
from quantkit.models.streaming import BlockInputs, advance, capture_inputs, run_block
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq.quantizer import BcqSettings, quantize
from quantkit.quantizers.trellis import quantizer as trellis
from quantkit.tuning.block import output_error, prediction_error, tune_block
from quantkit.tuning.install import tunable
from quantkit.tuning.optimize import split_windows
from quantkit.tuning.settings import TuneSettings
from tests.tiny import VOCABULARY, build_model
from tests.tuning.test_whole_model import SLOPE_RTOL, slopes

SETTINGS = TuneSettings(blocks=4, epochs=0, batch=2, rate=0.01)
WINDOWS, SEQ_LEN, INDEX = 12, 16, 1
# Errors are means of fp32 sums in two orders.
ERROR_RTOL = 1e-4
Method = Callable[[LayerInput, int], PackedWeight]
NOISE = 0.1  # share of the size of hidden states, of the errors that blocks before have made


def by_bcq(layer: LayerInput, bits: int) -> PackedWeight:
    return quantize(layer, BcqSettings(weight_bits=bits, group_size=32))


def by_trellis(layer: LayerInput, bits: int) -> PackedWeight:
    return trellis.quantize(layer, trellis.TrellisSettings(weight_bits=bits, taps=4, compensate=False))


def by_both(layer: LayerInput, bits: int) -> PackedWeight:
    return (by_trellis if "attn" in layer.name else by_bcq)(layer, bits)


def setting(family: str, bits: int = 2, method: Method = by_bcq) -> tuple[nn.Module, BlockInputs, Tensor]:
    """(the second block quantized, its inputs with errors, what the original gives for those without)."""
    return setting_with_weights(family, bits, method)[:3]


def setting_with_weights(
    family: str, bits: int, method: Method = by_bcq
) -> tuple[nn.Module, BlockInputs, Tensor, dict[str, Tensor]]:
    """As ``setting``, with the weights before quantization by name in the block."""
    model = build_model(family).eval()
    stream = in_memory_stream(model)
    prefix, block = stream.blocks[INDEX]
    with torch.no_grad():
        first = capture_inputs(stream, torch.randint(0, VOCABULARY, (WINDOWS, SEQ_LEN)))
        inputs = advance(stream.blocks[0][1], first, 0)
        targets = torch.cat([output for _, output in run_block(block, inputs, INDEX)])
    inputs = inputs.with_hidden(inputs.hidden + NOISE * inputs.hidden.std() * torch.randn_like(inputs.hidden))
    weights: dict[str, Tensor] = {}
    for name, module in block_linears(model).items():
        if name.startswith(f"{prefix}."):
            layer = LayerInput(name, linear_weight(module).detach().float().contiguous())
            weights[name.removeprefix(f"{prefix}.")] = layer.weight
            packed = method(layer, bits)
            model.set_submodule(name, QuantizedLinear.from_packed(packed, linear_bias(module), torch.float32))
    return block, inputs, targets, weights


def error_of(block: nn.Module, inputs: BlockInputs, targets: Tensor, windows: Tensor) -> float:
    """As output_error defines it, from the outputs of the block with its stored tensors."""
    outputs = torch.cat([output for _, output in run_block(block, inputs, INDEX, windows.tolist())])
    return ((outputs - targets[windows]).square().mean() / targets.square().mean()).item()


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, by_bcq) for family in ("llama", "opt", "gpt2", "bloom", "qwen3_moe", "lfm2")),
        *((family, by_trellis) for family in ("opt", "gpt2", "qwen3_moe")),
        ("opt", by_both),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_tuning_a_block_lowers_its_held_out_error(family: str, method: Method) -> None:
    block, inputs, targets = setting(family, method=method)
    held_out = split_windows(WINDOWS, SETTINGS.held_out)[1]
    before = error_of(block, inputs, targets, held_out)
    report = tune_block(block, INDEX, inputs, targets, SETTINGS, dtype=torch.float32)
    after = error_of(block, inputs, targets, held_out)
    assert report.before == pytest.approx(before, rel=ERROR_RTOL)
    assert report.after == pytest.approx(after, rel=ERROR_RTOL)
    assert report.kept > 0
    assert len(report.passes) == SETTINGS.blocks
    assert after < before


@pytest.mark.parametrize("family", ["llama", "bloom", "qwen3_moe"])
def test_windows_at_once_are_tuned_on_as_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for tokens in ({}, {"cpu": 2 * SEQ_LEN}):
        monkeypatch.setattr("quantkit.models.block_calls._TOKENS_AT_ONCE", tokens)
        torch.manual_seed(3)
        block, inputs, targets = setting(family)
        assert inputs.batches(3) == ([2, 1] if tokens else [1, 1, 1])
        reports.append(tune_block(block, INDEX, inputs, targets, replace(SETTINGS, batch=3), dtype=torch.float32))
    alone, together = reports
    assert together.passes == pytest.approx(alone.passes, rel=ERROR_RTOL)


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
def test_the_gradient_of_the_error_is_that_of_finite_differences(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along the gradient of scales, offsets, biases and norms together, without the rounding of scales."""
    block, inputs, targets = setting(family)
    monkeypatch.setattr("quantkit.quantizers.bcq.scales.ScaleGrid.round_scales", lambda _grid, scales: scales)
    monkeypatch.setattr("quantkit.quantizers.bcq.scales.ScaleGrid.round_offset", lambda _grid, offset: offset)
    loss, numbers = output_error(block, INDEX, inputs, targets), torch.arange(WINDOWS)
    with tunable(block, None) as tuned:
        slope, difference = slopes(tuned, lambda: loss(numbers))
    assert difference == pytest.approx(slope, rel=SLOPE_RTOL)


def test_codes_of_the_trellis_format_stay_where_others_are_chosen_again() -> None:
    block, inputs, targets, weights = setting_with_weights("opt", 2, by_both)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items() if name.endswith("signs")}
    settings = replace(SETTINGS, blocks=8, batch=1, block_codes=True)
    report = tune_block(block, INDEX, inputs, targets, settings, dtype=torch.float32, original=weights.__getitem__)
    assert report.after < report.before
    changed = {name for name, tensor in before.items() if not torch.equal(block.state_dict()[name], tensor)}
    assert changed == {"fc1.signs", "fc2.signs"}


def test_tuning_that_makes_a_block_worse_is_dropped() -> None:
    block, inputs, targets = setting("opt", bits=6)
    before = copy.deepcopy(block.state_dict())
    wild = TuneSettings(blocks=2, epochs=0, batch=2, rate=3.0)
    report = tune_block(block, INDEX, inputs, targets, wild, dtype=torch.float32)
    assert (report.kept, report.after) == (0, report.before)
    assert min(report.passes) >= report.before
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_tuning_a_block_is_deterministic_and_leaves_codes_alone() -> None:
    results: list[Any] = []
    for _ in range(2):
        torch.manual_seed(1)
        block, inputs, targets = setting("llama")
        codes = {name: tensor.clone() for name, tensor in block.state_dict().items() if name.endswith("signs")}
        torch.rand(7)  # the global generator is not what decides
        tune_block(block, INDEX, inputs, targets, SETTINGS, dtype=torch.float16)
        results.append(block.state_dict())
        assert codes
        assert all(torch.equal(block.state_dict()[name], tensor) for name, tensor in codes.items())
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name
        if tensor.ndim == 1:
            assert torch.equal(tensor, tensor.half().float()), name


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
def test_choosing_codes_again_lowers_the_held_out_error_of_a_block_further(family: str) -> None:
    settings = replace(SETTINGS, blocks=8, batch=1, block_codes=True)
    held_out, found = split_windows(WINDOWS, settings.held_out)[1], {}
    for codes in (False, True):
        torch.manual_seed(2)
        block, inputs, targets, weights = setting_with_weights(family, bits=2)
        before = {name: tensor.clone() for name, tensor in block.state_dict().items() if name.endswith("signs")}
        own = replace(settings, block_codes=codes)
        report = tune_block(block, INDEX, inputs, targets, own, dtype=torch.float32, original=weights.__getitem__)
        found[codes] = error_of(block, inputs, targets, held_out)
        assert report.after == pytest.approx(found[codes], rel=ERROR_RTOL)
        changed = [name for name, tensor in before.items() if not torch.equal(block.state_dict()[name], tensor)]
        assert bool(changed) is codes
    assert found[True] < found[False]


def test_a_block_that_gives_no_numbers_is_named() -> None:
    block, inputs, targets = setting("llama")
    broken = inputs.with_hidden(torch.full_like(inputs.hidden, torch.nan))
    with pytest.raises(StatsError, match="held-out loss of the quantized block 1 is not finite"):
        tune_block(block, INDEX, broken, targets, SETTINGS, dtype=torch.float32)


def divergence_of(model: nn.Module, reference: nn.Module, windows: Tensor) -> float:
    """KL(reference || model) per token, by whole models."""
    found, wanted = (each(windows).logits.log_softmax(dim=-1) for each in (model, reference))
    return nn.functional.kl_div(found, wanted, log_target=True, reduction="sum").item() / windows.numel()


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
def test_the_last_block_is_tuned_by_its_predictions_where_that_is_asked_for(family: str) -> None:
    model = build_model(family).eval()
    stream = in_memory_stream(model)
    original, (prefix, block) = copy.deepcopy(model), stream.blocks[-1]
    windows = torch.randint(0, VOCABULARY, (WINDOWS, SEQ_LEN))
    with torch.no_grad():
        inputs = advance(stream.blocks[0][1], capture_inputs(stream, windows), 0)
        targets = torch.cat([output for _, output in run_block(block, inputs, INDEX)])
    for name, module in block_linears(model).items():
        if name.startswith(f"{prefix}."):
            layer = LayerInput(name, linear_weight(module).detach().float().contiguous())
            quantized = QuantizedLinear.from_packed(by_bcq(layer, 2), linear_bias(module), torch.float32)
            model.set_submodule(name, quantized)
    held_out = split_windows(WINDOWS, SETTINGS.held_out)[1]
    with torch.no_grad():
        before = divergence_of(model, original, windows[held_out])
    outside = {name: p.clone() for name, p in model.named_parameters() if not name.startswith(prefix)}
    with frozen(model):
        loss = prediction_error(stream, inputs, targets, windows)
        report = tune_block(block, INDEX, inputs, targets, SETTINGS, dtype=torch.float32, loss=loss)
    with torch.no_grad():
        after = divergence_of(model, original, windows[held_out])
    assert report.before == pytest.approx(before, rel=ERROR_RTOL)
    assert report.after == pytest.approx(after, rel=ERROR_RTOL)
    assert after < before
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[name], p) for name, p in outside.items())
    assert all(parameters[name].grad is None for name in outside)
