from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.errors import RecipeError, StatsError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.formats.table import dequantize
from quantkit.quantizers import rounding
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import quantizer as bcq
from quantkit.quantizers.bcq.coding import CodeShape
from quantkit.quantizers.bcq.compensation import compensate, damp, group_order, refine
from quantkit.quantizers.bcq.levels import Coding
from quantkit.quantizers.bcq.quantizer import BcqSettings, solve_groups
from quantkit.quantizers.rounding import RtnSettings

FP32_RTOL = 1e-3  # differences of large sums in fp32
SCALE_RTOL = 2e-3  # two steps of fp16


def _layer(rows: int = 24, columns: int = 80, seed: int = 0) -> LayerInput:
    """A weight and the Hessian of inputs whose channels are strongly correlated."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + 0.1
    x = torch.randn(512, columns, generator=generator) @ mixing
    return LayerInput("block.layer", torch.randn(rows, columns, generator=generator), hessian=x.t() @ x / len(x))


def _loss(layer: LayerInput, quantized: Tensor) -> float:
    assert layer.hessian is not None
    residual = layer.weight - quantized
    return ((residual @ layer.hessian) * residual).sum().item()


@pytest.mark.parametrize("group_size", [32, -1], ids=["short-last-group", "row-wise"])
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
def test_compensated_coding_lowers_the_output_error(group_size: int, offset: bool) -> None:
    layer, settings = _layer(), BcqSettings(weight_bits=3, group_size=group_size, offset=offset)
    plain = _loss(layer, dequantize(bcq.quantize(layer, settings)))
    compensated = [
        _loss(layer, dequantize(bcq.quantize(layer, replace(settings, compensate=True, sweeps=sweeps))))
        for sweeps in (0, 1, 3)
    ]
    assert compensated[0] < 0.8 * plain
    assert compensated[2] <= compensated[1] <= compensated[0] * (1 + FP32_RTOL)
    assert compensated[2] < 0.995 * compensated[0]


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
def test_refined_groups_leave_less_for_the_columns_behind(offset: bool, scale_bits: int) -> None:
    settings = BcqSettings(2, 32, offset, compensate=True, sweeps=0, scale_bits=scale_bits, damping=0.01)
    losses = [
        sum(
            _loss(layer, dequantize(bcq.quantize(layer, replace(settings, group_sweeps=group_sweeps))))
            for layer in (_layer(seed=seed) for seed in range(3))
        )
        for group_sweeps in (0, 3)
    ]
    assert losses[1] < 0.97 * losses[0]


def test_a_group_that_is_the_row_is_refined_as_a_row() -> None:
    layer, settings = _layer(), BcqSettings(weight_bits=2, group_size=-1, compensate=True)
    once, twice = (bcq.quantize(layer, replace(settings, group_sweeps=group_sweeps)) for group_sweeps in (0, 2))
    assert all(torch.equal(tensor, twice.tensors[name]) for name, tensor in once.tensors.items())


@pytest.mark.parametrize(
    "values", [{"group_sweeps": -1, "compensate": True}, {"group_sweeps": 1}], ids=["negative", "plain"]
)
def test_group_sweeps_that_cannot_be_done_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="group_sweeps is"):
        BcqSettings(**values)


def test_compensated_rounding_lowers_the_output_error() -> None:
    layer, settings = _layer(), RtnSettings(weight_bits=3, group_size=32)
    plain, compensated = (
        _loss(layer, dequantize(rounding.quantize(layer, replace(settings, compensate=flag)))) for flag in (False, True)
    )
    assert compensated < 0.8 * plain


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_refining_never_raises_a_rows_loss(scale_bits: int) -> None:
    layer, settings = _layer(), BcqSettings(weight_bits=2, group_size=32)

    def fit(values: Tensor, importance: Tensor) -> Coding:
        return solve_groups(values, importance, settings)

    start, hessian = compensate(layer, CodeShape(2, 32, scale_bits), fit, damping=0.01)
    best = refine(layer.weight, hessian, start, sweeps=2, offset=True)
    before, after = (
        ((layer.weight - coding.dequantize()) @ hessian * (layer.weight - coding.dequantize())).sum(dim=1)
        for coding in (start, best)
    )
    assert (after <= before * (1 + FP32_RTOL)).all()


def test_stored_codes_are_levels_of_their_group() -> None:
    layer = _layer()
    packed = bcq.quantize(layer, BcqSettings(weight_bits=2, group_size=32, compensate=True))
    weight = dequantize(packed)
    for first in range(0, 80, 32):
        for row in weight[:, first : first + 32]:
            assert len(row.unique()) <= 4


def test_channel_without_input_keeps_its_rounded_weight() -> None:
    layer = _layer()
    assert layer.hessian is not None
    layer.hessian[5, :] = layer.hessian[:, 5] = 0
    packed = bcq.quantize(layer, BcqSettings(weight_bits=4, group_size=32, compensate=True))
    assert torch.isfinite(dequantize(packed)).all()
    assert (dequantize(packed)[:, 5] - layer.weight[:, 5]).abs().max() < layer.weight.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
def test_hessian_that_is_no_number_is_refused_by_name(value: float) -> None:
    layer = _layer()
    assert layer.hessian is not None
    layer.hessian[3, 4] = value
    with pytest.raises(StatsError, match=r"block\.layer.*NaN or Inf"):
        bcq.quantize(layer, BcqSettings(group_size=32, compensate=True))


def test_columns_of_a_group_may_come_in_any_order() -> None:
    layer, width = _layer(columns=72), 32  # the last group has 8 columns
    assert layer.hessian is not None
    generator = torch.Generator().manual_seed(3)
    shuffled = torch.cat([g[torch.randperm(len(g), generator=generator)] for g in torch.arange(72).split(width)])
    moved = replace(layer, weight=layer.weight[:, shuffled], hessian=layer.hessian[shuffled][:, shuffled])
    settings = BcqSettings(weight_bits=3, group_size=width, compensate=True, sweeps=0)
    here, there = (dequantize(bcq.quantize(one, settings)) for one in (layer, moved))
    close = torch.isclose(here[:, shuffled], there, rtol=SCALE_RTOL)
    assert close.float().mean() > 0.98  # libraries sum by memory alignment, so a code on the fence may fall either way


def test_groups_of_large_inputs_are_coded_first() -> None:
    diagonal = torch.tensor([1.0, 2.0, 9.0, 8.0, 3.0, 4.0, 50.0])
    order = group_order(diagonal, 2)
    assert order.groups.tolist() == [1, 2, 0, 3]  # the narrow one stays last
    assert order.columns.tolist() == [2, 3, 5, 4, 1, 0, 6]


def test_damping_shrinks_correlations_and_no_channel_by_anothers_size() -> None:
    hessian = torch.tensor([[1e6, 3.0], [3.0, 2.0]])
    damped = damp(hessian, 0.5)
    assert damped.tolist() == [[1.5e6, 3.0], [3.0, 3.0]]
    assert hessian[1, 1] == 2
