"""A trellis Linear with gradients: the same weight as stored, exact gradients of scales, codes that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.formats.trellis import TrellisSpec, TrellisTensors, dequantize_stored
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.trellis.quantizer import TrellisSettings, quantize
from quantkit.tuning.trellis_layer import TunedTrellisLinear

N, K = 80, 40  # the second ring is shorter
GRADIENT_RTOL = 1e-3  # of the loss's differences in fp32
STEP = 1e-2
PRODUCT_ATOL = 1e-5  # fp32 sums of 40 products, in another order
SETTINGS = [
    TrellisSettings(weight_bits=2, taps=4, compensate=False),
    TrellisSettings(weight_bits=4, taps=2, compensate=False),
    TrellisSettings(weight_bits=3, taps=3, compensate=False, rotate_inputs=True),
]
IDS = ["q2", "q4", "rotated"]


def linear(settings: TrellisSettings) -> QuantizedLinear:
    """A quantized Linear with a bias."""
    packed = quantize(LayerInput("layer", torch.randn(N, K)), settings)
    return QuantizedLinear.from_packed(packed, torch.randn(N), torch.float32)


def of_planes(quantized: QuantizedLinear) -> Tensor:
    """The weight that is multiplied: of rotated inputs, where they are."""
    return dequantize_stored(TrellisTensors.of(quantized.tensors), K)


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_tuned_linear_starts_as_the_stored_weight_and_packs_to_its_bits(settings: TrellisSettings) -> None:
    quantized = linear(settings)
    tuned, x = TunedTrellisLinear(quantized), torch.randn(5, K)
    assert torch.equal(tuned.dequantize(), of_planes(quantized))
    torch.testing.assert_close(tuned(x), quantized(x), rtol=0, atol=PRODUCT_ATOL)
    for name, tensor in tuned.packed().tensors.items():
        assert torch.equal(tensor, quantized.tensors[name]), name


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_gradients_of_scales_are_those_of_finite_differences(
    settings: TrellisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding of scales, which passes gradients straight through, the weight is linear in them."""
    tuned, x, wanted = TunedTrellisLinear(linear(settings)), torch.randn(5, K), torch.randn(5, N)
    monkeypatch.setattr("quantkit.tuning.trellis_layer.stored_scales", lambda scales: scales)

    def loss() -> Tensor:
        return (tuned(x) - wanted).square().mean()

    loss().backward()
    assert tuned.scales.grad is not None
    numeric = torch.zeros_like(tuned.scales)
    with torch.no_grad():
        for row in range(N):
            value, ends = tuned.scales[row].item(), []
            for step in (STEP, -STEP):
                tuned.scales[row] = value + step
                ends.append(loss().item())
            tuned.scales[row] = value
            numeric[row] = (ends[0] - ends[1]) / (2 * STEP)
    atol = GRADIENT_RTOL * float(numeric.abs().max())
    torch.testing.assert_close(tuned.scales.grad, numeric, atol=atol, rtol=GRADIENT_RTOL)


def test_what_is_packed_is_what_was_multiplied() -> None:
    """After a step that moves scales off the numbers of fp16, some below 0; codes and filter stay."""
    quantized = linear(SETTINGS[0])
    tuned = TunedTrellisLinear(quantized)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert bool((tuned.scales < 0).any())
    multiplied, stored = tuned.dequantize().detach(), tuned.quantized()
    assert torch.equal(of_planes(stored), multiplied)
    for name in ("signs", "filter"):
        assert torch.equal(stored.tensors[name], quantized.tensors[name])
    assert stored.bias is not None
    assert tuned.bias is not None
    assert torch.equal(stored.bias, tuned.bias)
    assert stored.spec == TrellisSpec(2, 4)


def test_what_stays_is_no_parameter() -> None:
    tuned = TunedTrellisLinear(linear(replace(SETTINGS[0])))
    assert {name for name, _ in tuned.named_parameters()} == {"scales", "bias"}
    assert not tuned.state_dict().keys() & {"signs", "filter", "units"}
