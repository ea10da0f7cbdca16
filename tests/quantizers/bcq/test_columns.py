"""What a GPU replays as one graph does what the loops on a CPU do, to the bit: both run on the CPU here."""

from __future__ import annotations

import pytest
import torch

from quantkit.jobs.solve_layers import split_rows
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq import compensation, quantizer
from quantkit.quantizers.bcq.quantizer import BcqSettings, alternate, alternate_all, greedy, quantize


@pytest.fixture
def layer() -> LayerInput:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, 320, generator=generator) * torch.rand(320, generator=generator).add(0.1)
    return LayerInput("layer", torch.randn(24, 320, generator=generator), hessian=x.t() @ x / 600)


def _same(first: quantizer.PackedWeight, second: quantizer.PackedWeight) -> bool:
    return all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())


@pytest.mark.parametrize("offset", [True, False])
def test_alternation_of_all_groups_ends_where_that_of_the_active_ones_does(offset: bool) -> None:
    values, importance = torch.randn(300, 64), torch.rand(300, 64) + 0.01
    start = greedy(values, importance, 3, offset=offset)
    expected, least = alternate(values, importance, start, 15, offset=offset)
    found, error = alternate_all(values, importance, start, 15, offset=offset)
    # Sums over one group in a batch of another size round in another order; a few groups may end one round apart.
    torch.testing.assert_close(error, least, rtol=2e-3, atol=0)
    assert (found.scales == expected.scales).all(dim=0).float().mean() > 0.98


@pytest.mark.parametrize("group_size", [64, 128])
def test_blocks_of_columns_in_one_step_are_the_loops(
    group_size: int, layer: LayerInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BcqSettings(weight_bits=3, group_size=group_size, compensate=True)
    looped = quantize(layer, settings)
    monkeypatch.setattr(compensation, "_replays", lambda weight, coding: True)
    assert _same(quantize(layer, settings), looped)


def test_both_starts_at_once_are_those_one_by_one(layer: LayerInput) -> None:
    settings = BcqSettings(weight_bits=4)
    values, importance = layer.weight.reshape(-1, 64), torch.rand(120, 64) + 0.01
    expected = quantizer.solve_groups(values, importance, settings)
    scales, offset = quantizer._solve_at_once(values, importance, settings)
    found = quantizer.weighted_error(quantizer.Coding(scales, offset).nearest(values).levels(), values, importance)
    best = quantizer.weighted_error(expected.nearest(values).levels(), values, importance)
    torch.testing.assert_close(found, best, rtol=2e-3, atol=1e-6)


def test_layers_solved_as_one_weight_are_those_solved_alone(layer: LayerInput) -> None:
    settings = BcqSettings(weight_bits=4, group_size=64, compensate=True, scale_bits=8)
    parts = [
        LayerInput(f"part{n}", rows.contiguous(), hessian=layer.hessian)
        for n, rows in enumerate(layer.weight.split([8, 16]))
    ]
    together = list(split_rows(quantize(layer, settings), parts))
    for part, packed in zip(parts, together, strict=True):
        alone = quantize(part, settings)
        assert packed.shape == alone.shape == tuple(part.weight.shape)
        agree = (packed.tensors["signs"] == alone.tensors["signs"]).float().mean()
        assert agree > 0.98  # products of other sizes round otherwise, which moves weights next to a middle
        assert packed.report["weight_error"] == pytest.approx(alone.report["weight_error"], rel=0.01)
