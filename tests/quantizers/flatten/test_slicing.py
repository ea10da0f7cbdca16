from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.quantizers.flatten.slicing import (
    Operands,
    Split,
    clamp_error,
    extended_columns,
    limit_columns,
    most_slices,
    output_error,
    relative_error,
    split_channels,
)

FP32_RTOL = 1e-6


def _operands(channels: int = 16, massive: float = 400.0, seed: int = 0) -> Operands:
    """Rows of size 1 beside a maximum of channel 2 that the sample missed."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, channels, generator=generator)
    weight = torch.randn(8, channels, generator=generator)
    absmax = rows.abs().amax(0) * 1.5
    absmax[2] = massive
    return Operands(rows, weight, absmax)


def test_split_channels_worked_by_hand() -> None:
    split = split_channels(torch.tensor([7.0, 7.1, 21.0, 0.0]), threshold=7.0, bits=4)
    assert (split.scale, split.top, split.threshold) == (1.0, 7, 7.0)
    assert split.slices.tolist() == [1, 1, 3, 1]  # 7.1 rounds to 7
    assert split_channels(torch.tensor([7.6, 1.0]), 7.0, 4).slices.tolist() == [2, 1]


def test_nothing_is_cut_below_the_threshold() -> None:
    split = split_channels(torch.tensor([1.0, 2.54]), threshold=100.0, bits=8)
    assert split.slices.tolist() == [1, 1]
    assert split.scale == pytest.approx(2.54 / 127, rel=FP32_RTOL)


@pytest.mark.parametrize("bits", [4, 8])
def test_calibrated_values_are_never_clamped(bits: int) -> None:
    values = torch.randn(50, 30) * torch.logspace(-2, 2, 30)
    split = split_channels(values.abs().amax(0), threshold=1.3, bits=bits)
    assert (split.dequantized(values) - values).abs().max() <= split.scale / 2 * (1 + 1e-3)


def test_other_width_keeps_threshold_and_slices() -> None:
    split = split_channels(torch.tensor([1.0, 9.0]), threshold=2.0, bits=8)
    narrow = split.with_bits(4)
    assert narrow.threshold == pytest.approx(split.threshold)
    assert torch.equal(narrow.slices, split.slices)
    assert narrow.scale == pytest.approx(split.scale * 127 / 7)


def test_extended_columns_multiply_slices() -> None:
    assert extended_columns(Split(1, 8, torch.tensor([1, 3, 2])), Split(1, 8, torch.tensor([1, 2, 1]))) == 5 + 1


def test_relative_error_counts_every_row_alike_and_skips_zero_rows() -> None:
    exact = torch.tensor([[1.0, 0.0], [0.0, 1000.0], [0.0, 0.0]])
    assert relative_error(exact, torch.tensor([[0.5, 0.0], [0.0, 1000.0], [1.0, 0.0]])) == pytest.approx(0.125)
    assert relative_error(torch.zeros(2, 2), torch.ones(2, 2)) == 0


def test_clamping_costs_nothing_without_a_clamp_and_more_the_deeper_it_is() -> None:
    operands = _operands()
    whole = split_channels(operands.act_absmax, 2.0, 8)
    costs = [clamp_error(operands, replace(whole, slices=whole.slices.clamp_max(n))) for n in (10**6, 150, 50, 2)]
    assert costs[0] == 0
    assert costs == sorted(costs)


def test_losing_a_massive_channel_costs_as_much_as_losing_every_token() -> None:
    operands = _operands()
    whole = split_channels(operands.act_absmax, 10.0, 8)  # only the massive channel is above
    cost = clamp_error(operands, replace(whole, slices=whole.slices.clamp_max(1)))
    assert cost == pytest.approx(1, rel=0.1)


def test_losing_one_channel_of_many_costs_little() -> None:
    operands = _operands(channels=400, massive=6.0)
    whole = split_channels(operands.act_absmax, 5.0, 8)
    assert whole.slices[2] == 2
    assert 0 < clamp_error(operands, replace(whole, slices=whole.slices.clamp_max(1))) < 5e-3


def test_most_slices_fills_the_budget_and_no_more() -> None:
    operands = _operands()
    acts = split_channels(operands.act_absmax, 2.0, 8)
    weights = Split(1.0, 8, torch.ones(16, dtype=torch.long))
    capped = most_slices(acts, weights, 40)
    assert capped is not None
    assert extended_columns(capped, weights) <= 40
    more = replace(acts, slices=acts.slices.clamp_max(int(capped.slices.max()) + 1))
    assert extended_columns(more, weights) > 40


def test_most_slices_gives_up_where_the_weight_alone_is_too_wide() -> None:
    acts = Split(1.0, 8, torch.ones(4, dtype=torch.long))
    assert most_slices(acts, Split(1.0, 8, torch.tensor([3, 3, 1, 1])), 3) is None


@pytest.mark.parametrize("max_extended", [8, 16, 64])
def test_limit_is_kept_and_a_wider_one_is_never_worse(max_extended: int) -> None:
    operands = _operands()
    acts = split_channels(operands.act_absmax, 2.0, 8)
    weights = split_channels(operands.weight.abs().amax(0), 2.0, 8)

    def cost(limit: int) -> float:
        found = limit_columns(operands, acts, weights, limit)
        assert extended_columns(found.acts, found.weights) <= limit
        return output_error(operands, found.acts, found.weights) + clamp_error(operands, found.acts)

    assert cost(2 * max_extended) <= cost(max_extended) * (1 + 1e-9)


def test_a_massive_channel_is_covered_by_a_coarser_threshold_rather_than_cut_off() -> None:
    operands = _operands(massive=4000.0)
    acts = split_channels(operands.act_absmax, 2.0, 8)
    weights = Split(1.0, 8, torch.ones(16, dtype=torch.long))
    found = limit_columns(operands, acts, weights, 400)
    assert found.act_step > 1
    assert found.acts.capacity()[2] > 0.8 * 4000
    assert output_error(operands, found.acts, weights) < 0.2


@pytest.mark.parametrize("max_extended", [0, 1, 3])
def test_limit_is_kept_where_the_weight_alone_is_too_wide(max_extended: int) -> None:
    operands = _operands()
    acts = split_channels(operands.act_absmax, 2.0, 8)
    weights = split_channels(operands.weight.abs().amax(0), 0.7, 8)
    found = limit_columns(operands, acts, weights, max_extended)
    assert extended_columns(found.acts, found.weights) <= max_extended
    assert found.weight_step > 1
