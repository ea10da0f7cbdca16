from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError
from quantkit.formats.table import dequantize
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.hqq import HqqSettings, fit_half_quadratic, quantize, soft_threshold
from quantkit.quantizers.rounding import fit_uniform

NORM = 0.7
GRID_RTOL = 2**-9  # two fp16 roundings, of the half step and of the offset, in each of the rounds
LOSS_RTOL = 1e-6  # fp32 sums of 64 terms in another order


def _heavy_tailed(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) ** 3


def _loss(values: Tensor, levels: Tensor) -> Tensor:
    return (levels - values).abs().pow(NORM).sum(dim=-1)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_no_group_is_worse_than_round_to_nearest(bits: int) -> None:
    values = _heavy_tailed(64, 64)
    start = fit_uniform(values, torch.ones_like(values), bits, symmetric=False, clip=False)
    fitted = fit_half_quadratic(values, bits, norm=NORM, rounds=20)
    before, after = (_loss(values, grid.encode(values)[1]) for grid in (start, fitted))
    assert bool((after <= before * (1 + LOSS_RTOL)).all())
    assert after.sum() < 0.95 * before.sum()  # and most are better


def test_an_outlier_is_given_up_for_the_rest() -> None:
    """One weight of 128 at ten times the deviation takes half of a 3-bit grid between minimum and maximum."""
    values = torch.randn(64, 128)
    values[:, 0] = 10.0
    start, fitted = (fit_half_quadratic(values, 3, norm=NORM, rounds=rounds) for rounds in (0, 20))
    before, after = ((grid.encode(values)[1] - values).abs()[:, 1:].mean() for grid in (start, fitted))
    assert after < 0.8 * before


def test_rounds_follow_the_published_steps() -> None:
    """One group, three rounds, beside the two steps of the source written out in float64."""
    values, bits = _heavy_tailed(1, 64), 3
    fitted = fit_half_quadratic(values, bits, norm=NORM, rounds=3)
    w, top = values[0].double().numpy(), 2**bits - 1
    step, offset = (w.max() - w.min()) / top, (w.max() + w.min()) / 2
    unit, found = step, []
    for k in range(4):
        codes = np.clip(np.round((w - offset) / step + top / 2), 0, top)
        error = w - ((codes - top / 2) * step + offset)
        found.append(((np.abs(error) ** NORM).sum(), step, offset))
        r = np.abs(error / unit)
        with np.errstate(divide="ignore"):  # an error of 0 is given up by 0
            given_up = unit * np.sign(error) * np.maximum(0, r - r ** (NORM - 1) / 1.01**k)
        step, offset = np.polyfit(codes - top / 2, w - given_up, 1)
    _, step, offset = min(found)
    assert 2 * fitted.half_step.item() == pytest.approx(step, rel=GRID_RTOL)
    assert fitted.offset.item() == pytest.approx(offset, rel=GRID_RTOL, abs=GRID_RTOL * step)


@pytest.mark.parametrize("norm", [0.5, 0.7, 1.0])
def test_soft_threshold_is_the_minimum_it_claims(norm: float) -> None:
    penalty, second_order = 50.0, 1e-3  # of the shift |r|^(p - 1) / penalty
    for residual in (-2.0, 0.01, 0.5, 3.0):
        found = soft_threshold(torch.tensor([residual]), norm, penalty).item()
        e = np.linspace(-4, 4, 80_001)
        best = e[np.argmin(np.abs(e) ** norm / norm + penalty / 2 * (residual - e) ** 2)]
        assert found == pytest.approx(best, abs=second_order)


def test_units_of_the_weight_do_not_change_its_codes() -> None:
    weight = _heavy_tailed(8, 128)
    small, large = (quantize(LayerInput("layer", weight * unit), HqqSettings(weight_bits=3)) for unit in (1.0, 64.0))
    assert torch.equal(small.tensors["signs"], large.tensors["signs"])
    assert torch.equal(dequantize(small) * 64.0, dequantize(large))


@pytest.mark.parametrize("scale_bits", [16, 8])
@pytest.mark.parametrize("columns", [128, 72], ids=["whole-groups", "short-last-group"])
def test_report_and_size_are_those_of_the_container(columns: int, scale_bits: int) -> None:
    weight = torch.randn(16, columns)
    packed = quantize(LayerInput("layer", weight), HqqSettings(group_size=64, scale_bits=scale_bits))
    error = ((dequantize(packed) - weight).square().sum() / weight.square().sum()).item()
    assert packed.report["weight_error"] == pytest.approx(error, rel=1e-4)
    assert error < 0.02  # 4 bits of Gaussian weights between minimum and maximum of 64


@pytest.mark.parametrize("value", [0.0, -1.5], ids=["zero", "constant"])
def test_a_constant_group_is_exact(value: float) -> None:
    weight = torch.full((4, 32), value)
    assert torch.equal(dequantize(quantize(LayerInput("layer", weight), HqqSettings(group_size=32))), weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"norm": 0.0}, "norm is 0.0"), ({"norm": 1.5}, "norm is 1.5"), ({"rounds": -1}, "rounds is -1")],
    ids=["norm-0", "norm-large", "rounds"],
)
def test_impossible_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        HqqSettings(**settings)  # type: ignore[arg-type]
