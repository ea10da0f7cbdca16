from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.bcq import ROW_WISE
from quantkit.formats.table import dequantize, stored_bytes
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import quantizer as bcq
from quantkit.quantizers.bcq.compensation import damp
from quantkit.quantizers.trellis.quantizer import TrellisSettings, quantize, stored_specs

DAMPING = 0.5


def _layer(rows: int = 64, columns: int = 40) -> LayerInput:
    x = torch.randn(4 * columns, columns) @ (torch.eye(columns) + 0.5 * torch.randn(columns, columns) / columns**0.5)
    return LayerInput("layer", torch.randn(rows, columns) * 0.02, None, x.t() @ x / len(x))


def _loss(layer: LayerInput, weight: Tensor) -> float:
    assert layer.hessian is not None
    residual = layer.weight - weight
    return float(((residual @ damp(layer.hessian, DAMPING)) * residual).sum())


def _settings(**values: Any) -> TrellisSettings:
    return TrellisSettings(**{"weight_bits": 2, "taps": 4, "sweeps": 1, "damping": DAMPING, **values})


@pytest.mark.parametrize(("bits", "taps"), [(2, 4), (3, 3), (4, 2)])
def test_a_weight_is_nearer_than_binary_coding_of_more_bytes_gets(bits: int, taps: int) -> None:
    layer = _layer(rows=128, columns=256)
    packed = quantize(layer, _settings(weight_bits=bits, taps=taps, compensate=False))
    scalar = bcq.quantize(layer, bcq.BcqSettings(weight_bits=bits, group_size=ROW_WISE))
    assert packed.report["weight_error"] < 0.85 * scalar.report["weight_error"]
    assert stored_bytes(packed.spec, packed.shape) < stored_bytes(scalar.spec, scalar.shape)


def test_compensation_and_each_sweep_lower_the_loss() -> None:
    layer = _layer()
    ways: list[dict[str, Any]] = [{"compensate": False}, {"sweeps": 0}, {"sweeps": 1}, {"sweeps": 3}]
    losses = [_loss(layer, dequantize(quantize(layer, _settings(**way)))) for way in ways]
    assert losses[1] < 0.9 * losses[0]
    assert losses[3] <= losses[2] <= losses[1]
    assert losses[3] < 0.98 * losses[1]


def test_the_spec_is_what_settings_say_and_the_same_input_gives_the_same_bytes() -> None:
    layer, settings = _layer(rows=80), _settings()
    packed, again = quantize(layer, settings), quantize(layer, settings)
    assert stored_specs(settings, packed.shape) == (packed.spec,)
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in packed.tensors.items())


def test_no_taps_are_the_most_that_there_are() -> None:
    assert [TrellisSettings(weight_bits=bits).shape for bits in (2, 3, 4)] == [(2, 6), (3, 5), (4, 4)]


def test_units_of_a_weight_do_not_matter() -> None:
    layer = _layer()
    larger = LayerInput("layer", layer.weight * 8, None, layer.hessian)
    found, other = (quantize(it, _settings()) for it in (layer, larger))
    assert torch.equal(found.tensors["signs"], other.tensors["signs"])
    assert torch.equal(found.tensors["scales"].float() * 8, other.tensors["scales"].float())


def test_a_row_of_zeros_stays_near_zero_and_finite() -> None:
    layer = _layer()
    layer.weight[5] = 0
    weight = dequantize(quantize(layer, _settings()))
    assert torch.isfinite(weight).all()
    assert weight[5].abs().max() < 1e-6


def test_rotated_inputs_are_undone_by_dequantizing() -> None:
    layer = _layer(columns=64)
    packed = quantize(layer, _settings(weight_bits=4, taps=2, rotate_inputs=True))
    assert packed.spec.rotate_inputs
    assert packed.report["weight_error"] < 0.02


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight_bits": 5}, "weight_bits is 5; method trellis has 2, 3, 4"),
        ({"taps": 5}, "taps is 5; with weight_bits 2 choose 4 or 6"),
        ({"sweeps": -1}, "sweeps is -1"),
        ({"damping": 0.0}, "damping is 0.0"),
        ({"rotate": "offline"}, "rotate is 'offline'"),
        ({"hessian": "end_loss", "compensate": False}, "hessian: end_loss is for compensation"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _settings(**values)


def test_rows_that_make_no_ring_are_refused_before_anything_is_quantized() -> None:
    with pytest.raises(RecipeError, match="a multiple of 16, not 40"):
        stored_specs(_settings(), (40, 64))
    with pytest.raises(RecipeError, match="a multiple of 16, not 40"):
        quantize(_layer(rows=40), _settings())


def test_a_missing_or_broken_hessian_names_the_layer() -> None:
    layer = LayerInput("model.q_proj", torch.randn(64, 16))
    with pytest.raises(StatsError, match=r"model\.q_proj: compensation needs a Hessian"):
        quantize(layer, _settings())
    broken = LayerInput("model.q_proj", torch.randn(64, 16), None, torch.full((16, 16), torch.nan))
    with pytest.raises(StatsError, match=r"model\.q_proj"):
        quantize(broken, _settings())
