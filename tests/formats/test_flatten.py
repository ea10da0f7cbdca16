from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats.flatten import (
    FORMAT,
    MAX_COLUMNS,
    FlattenSpec,
    pack_nibbles,
    segment_capacity,
    take_slices,
    unpack_nibbles,
)
from quantkit.formats.table import spec_from_json, spec_to_json, stored_bytes
from quantkit.quantizers.flatten.slicing import Split, column_map

FP64_RTOL = 1e-12  # a few thousand products of fp64


def test_take_slices_worked_by_hand_with_negative_values() -> None:
    # INT4: a slice holds 7. 20 = 7 + 7 + 6, -9 = -7 - 2, 3 fits.
    x = torch.tensor([[20.0, -9.0, 3.0]])
    channel = torch.tensor([0, 1, 2, 0, 0, 1])
    segment = torch.tensor([0, 0, 0, 1, 2, 1])
    assert take_slices(x, channel, segment, 7).tolist() == [[7, -7, 3, 7, 6, -2]]
    assert take_slices(-x, channel, segment, 7).tolist() == [[-7, 7, -3, -7, -6, 2]]


def test_take_slices_of_a_multiple_of_the_threshold_leaves_nothing_over() -> None:
    codes = take_slices(torch.tensor([[14.0]]), torch.tensor([0, 0, 0]), torch.tensor([0, 1, 2]), 7)
    assert codes.tolist() == [[7, 7, 0]]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    bits=st.sampled_from([4, 8]),
    act_scale=st.floats(1e-3, 10),
    weight_scale=st.floats(1e-3, 10),
)
def test_flattening_both_operands_is_exact_before_rounding(
    seed: int, bits: int, act_scale: float, weight_scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 12, generator=generator, dtype=torch.float64) * 40
    w = torch.randn(7, 12, generator=generator, dtype=torch.float64) * 3
    acts, weights = (
        Split(scale, bits, (values.abs().amax(0) / (scale * (2 ** (bits - 1) - 1))).ceil().clamp_min(1).long())
        for values, scale in ((x, act_scale), (w, weight_scale))
    )
    # Very small thresholds would need millions of columns.
    if int((acts.slices * weights.slices).sum()) > 100_000:
        return
    columns = column_map(acts, weights)
    flat_x = take_slices(x / acts.scale, columns.channel, columns.act_segment, acts.top)
    flat_w = take_slices(w / weights.scale, columns.channel, columns.weight_segment, weights.top)
    assert flat_x.abs().max() <= acts.top
    assert flat_w.abs().max() <= weights.top
    product = flat_x @ flat_w.t() * (acts.scale * weights.scale)
    torch.testing.assert_close(product, x @ w.t(), rtol=FP64_RTOL, atol=FP64_RTOL * (x.abs() @ w.abs().t()).max())


def test_column_map_lists_every_pair_of_slices_once() -> None:
    acts, weights = Split(1.0, 8, torch.tensor([1, 3, 2])), Split(1.0, 8, torch.tensor([1, 2, 1]))
    columns = column_map(acts, weights)
    triples = list(
        zip(columns.channel.tolist(), columns.act_segment.tolist(), columns.weight_segment.tolist(), strict=True)
    )
    assert triples[:3] == [(0, 0, 0), (1, 0, 0), (2, 0, 0)]
    assert sorted(triples) == sorted(
        [(0, 0, 0), *((1, a, b) for a in range(3) for b in range(2)), (2, 0, 0), (2, 1, 0)]
    )


def test_nibbles_round_trip_and_lie_low_first() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
    assert pack_nibbles(torch.tensor([[1, -1]], dtype=torch.int8)).tolist() == [[0xF1]]


def test_capacity_is_the_number_of_slices_and_ignores_padding() -> None:
    channel = torch.tensor([0, 1, 2, 1, 1, 0, 0], dtype=torch.int32)
    segment = torch.tensor([0, 0, 0, 1, 2, 0, 0], dtype=torch.int32)
    assert segment_capacity(channel, segment, 3).tolist() == [1, 3, 1]


@pytest.mark.parametrize("smooth", [False, True], ids=["plain", "smooth"])
def test_dequantize_adds_weight_slices_and_undoes_smoothing(smooth: bool) -> None:
    spec = FlattenSpec(8, 8, 32, smooth=smooth)
    codes = torch.zeros(1, 32, dtype=torch.int8)
    codes[0, :4] = torch.tensor([127, -5, 73, 127])  # channel 0: 127 + 73; the last column repeats it for x beyond T
    tensors = {
        "codes": codes,
        "source_channel": torch.tensor([0, 1, 0, 0] + [0] * 28, dtype=torch.int32),
        "source_segment": torch.tensor([0, 0, 0, 1] + [0] * 28, dtype=torch.int32),
        "weight_scale": torch.tensor([0.5]),
        "act_scale": torch.tensor([1.0]),
        "smooth_scale": torch.tensor([2.0, 4.0]),
    }
    expected = [[50.0, -0.625]] if smooth else [[100.0, -2.5]]
    assert FORMAT.dequantize(spec, tensors, (1, 2)).tolist() == expected


@pytest.mark.parametrize(
    ("bits", "columns"),
    [((3, 8), 32), ((8, 5), 32), ((8, 8), 33), ((8, 8), 0), ((8, 8), MAX_COLUMNS + 32)],
    ids=["W3", "A5", "odd", "none", "int32 overflow"],
)
def test_spec_refuses_what_no_kernel_can_run(bits: tuple[int, int], columns: int) -> None:
    with pytest.raises(RecipeError):
        FlattenSpec(*bits, columns)


def test_largest_width_cannot_overflow_int32() -> None:
    assert MAX_COLUMNS * 127 * 127 < 2**31


def test_spec_round_trips_through_json() -> None:
    spec = FlattenSpec(4, 4, 96, smooth=True)
    assert spec_from_json(spec_to_json(spec)) == spec
    with pytest.raises(CheckpointError, match="extended_channels"):
        spec_from_json({**spec_to_json(spec), "extended_channels": 95})


def test_int4_halves_the_codes() -> None:
    rows, overhead = 64, 2 * 4 * 96 + 8  # two int32 maps and two scales
    assert stored_bytes(FlattenSpec(8, 8, 96), (rows, 80)) == rows * 96 + overhead
    assert stored_bytes(FlattenSpec(4, 4, 96), (rows, 80)) == rows * 48 + overhead
