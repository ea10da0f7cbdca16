"""A bcq Linear with gradients: the same weight as stored, exact gradients, codes that are chosen again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from quantkit.formats.bcq import BcqTensors, dequantize_stored
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq.quantizer import BcqSettings, quantize
from quantkit.tuning.layer import TunedLinear
from quantkit.tuning.part import expanded_once

N, K = 6, 40  # the last group of a row is shorter
# Of a loss of about 10 in fp32, differences over a step of 1e-2: 2^-24 * 10 / 1e-2, and some room.
GRADIENT_ATOL = 1e-3
STEP = 1e-2
PRODUCT_ATOL = 1e-5  # fp32 sums of 40 products, in another order
SUM_RTOL = 1e-4  # gradients of two inputs, added before they are summed over a group or after
SETTINGS = [
    BcqSettings(weight_bits=2, group_size=16),
    BcqSettings(weight_bits=3, group_size=16, offset=False),
    BcqSettings(weight_bits=2, group_size=16, scale_bits=8),
    BcqSettings(weight_bits=1, group_size=-1),
    BcqSettings(weight_bits=2, group_size=16, rotate_inputs=True),
]
IDS = ["offset", "no-offset", "coded-scales", "row", "rotated"]


def linear(settings: BcqSettings) -> tuple[QuantizedLinear, Tensor]:
    """A quantized Linear with a bias, and the weight that it was made of."""
    weight = torch.randn(N, K)
    packed = quantize(LayerInput("layer", weight), settings)
    return QuantizedLinear.from_packed(packed, torch.randn(N), torch.float32), weight


def of_planes(tensors: Mapping[str, Tensor], settings: BcqSettings) -> Tensor:
    """The weight that is multiplied: of rotated inputs, where they are."""
    return dequantize_stored(BcqTensors.of(tensors), K, settings.group_size)


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize("chosen_again", [True, False], ids=["codes", "fixed"])
def test_tuned_linear_starts_as_the_stored_weight_and_packs_to_its_bits(
    settings: BcqSettings, chosen_again: bool
) -> None:
    quantized, weight = linear(settings)
    tuned = TunedLinear(quantized, weight if chosen_again else None)
    assert torch.equal(tuned.dequantize(), of_planes(quantized.tensors, settings))
    x = torch.randn(5, K)
    torch.testing.assert_close(tuned(x), quantized(x), rtol=0, atol=PRODUCT_ATOL)
    for name, tensor in tuned.packed().tensors.items():
        assert torch.equal(tensor, quantized.tensors[name]), name


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_gradients_of_scales_and_offset_are_those_of_finite_differences(
    settings: BcqSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding of scales, which passes gradients straight through, the weight is linear in them."""
    quantized, _ = linear(settings)
    tuned, x, wanted = TunedLinear(quantized, None), torch.randn(5, K), torch.randn(5, N)
    monkeypatch.setattr("quantkit.quantizers.bcq.scales.ScaleGrid.round_scales", lambda _grid, scales: scales)
    monkeypatch.setattr("quantkit.quantizers.bcq.scales.ScaleGrid.round_offset", lambda _grid, offset: offset)

    def loss() -> Tensor:
        return (tuned(x) - wanted).square().mean()

    loss().backward()
    for name in ("scales", "offset") if settings.offset else ("scales",):
        parameter = getattr(tuned, name)
        assert parameter.grad is not None
        numeric = torch.zeros_like(parameter)
        with torch.no_grad():
            for index in range(parameter.numel()):
                value = parameter.view(-1)[index].item()
                ends = []
                for step in (STEP, -STEP):
                    parameter.view(-1)[index] = value + step
                    ends.append(loss().item())
                parameter.view(-1)[index] = value
                numeric.view(-1)[index] = (ends[0] - ends[1]) / (2 * STEP)
        torch.testing.assert_close(parameter.grad, numeric, atol=GRADIENT_ATOL, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
@pytest.mark.parametrize("chosen_again", [True, False], ids=["codes", "fixed"])
def test_a_weight_expanded_once_gathers_the_gradients_of_all_backward_passes(
    settings: BcqSettings, chosen_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, weight = linear(settings)
    original = weight if chosen_again else None
    apart, together, unused = (TunedLinear(quantized, original) for _ in range(3))
    inputs = [torch.randn(5, K) for _ in range(2)]
    for x in inputs:
        apart(x).square().sum().backward()
    expand, expanded = TunedLinear.dequantize, []

    def counted(part: TunedLinear) -> Tensor:
        expanded.append(part)
        return expand(part)

    monkeypatch.setattr(TunedLinear, "dequantize", counted)
    with expanded_once([together, unused]):
        for x in inputs:
            together(x).square().sum().backward()
    assert expanded == [together, unused]
    for name, parameter in apart.named_parameters():
        assert parameter.grad is not None
        found = together.get_parameter(name).grad
        torch.testing.assert_close(found, parameter.grad, rtol=SUM_RTOL, atol=GRADIENT_ATOL)
    assert unused.scales.grad is not None  # as of an expert that had no token
    assert not unused.scales.grad.any()
    with torch.no_grad():
        together.scales.add_(1)
    assert not torch.equal(together(inputs[0]), apart(inputs[0]))  # it expands anew outside


def test_a_weight_whose_original_is_outside_the_cell_of_its_code_starts_well_inside() -> None:
    """Of one plane the border between the two cells is the offset."""
    quantized, weight = linear(BcqSettings(weight_bits=1, group_size=-1))
    tuned = TunedLinear(quantized, torch.full_like(weight, 100.0))
    assert tuned.latent is not None
    assert tuned.offset is not None
    levels, border = tuned.dequantize().detach(), tuned.offset.detach().expand(N, K)
    below = levels < border
    assert below.any()
    assert not below.all()
    inside = levels + 0.7 * (border - levels)
    torch.testing.assert_close(tuned.latent.detach()[below], inside[below], rtol=0, atol=PRODUCT_ATOL)
    assert (tuned.latent.detach()[~below] == 100.0).all()  # outermost cells have no border on that side


def test_latent_weights_get_the_gradient_of_the_weight() -> None:
    quantized, weight = linear(SETTINGS[0])
    tuned, gradient = TunedLinear(quantized, weight), torch.randn(N, K)
    tuned.dequantize().backward(gradient)
    assert tuned.latent is not None
    assert tuned.latent.grad is not None
    assert torch.equal(tuned.latent.grad[:, :K], gradient)


@pytest.mark.parametrize("settings", SETTINGS, ids=IDS)
def test_what_is_packed_is_what_was_multiplied(settings: BcqSettings) -> None:
    """After a step that moves scales, offsets and codes, all of them off their grids, and some scales below 0."""
    quantized, weight = linear(settings)
    tuned = TunedLinear(quantized, weight)
    before = tuned.codes.clone()
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    multiplied = tuned.dequantize().detach()
    assert not torch.equal(tuned.codes, before)
    assert torch.equal(of_planes(tuned.packed().tensors, settings), multiplied)
    stored = tuned.quantized()
    assert torch.equal(of_planes(stored.tensors, settings), multiplied)
    assert stored.bias is not None
    assert tuned.bias is not None
    assert torch.equal(stored.bias, tuned.bias)
