"""Bipolar-INT codes, planes and activations: Eq 1, and exact conversions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError, RecipeError, StatsError
from quantkit.formats.bipolar import (
    LARGEST_BYTE,
    MOST_CODED_BITS,
    BipolarSpec,
    bipolar_tensors,
    check_exact,
    codes_to_values,
    dequantize_bipolar,
    largest_scale,
    largest_value,
    nearest_codes,
    quantize_activations,
    quantize_with_zero,
    values_to_codes,
)
from quantkit.formats.hadamard import rotate
from quantkit.formats.planes import pack_codes, unpack_codes
from quantkit.formats.table import FORMATS, spec_from_json, spec_to_json, stored_bytes

# Eq 1 worked by hand: the value of every code, in the order of the codes.
GOLDEN_VALUES = {
    1: [-1, 1],
    2: [-3, -1, 1, 3],
    3: [-7, -5, -3, -1, 1, 3, 5, 7],
    4: [-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15],
}
WIDTHS = range(1, 9)


@pytest.mark.parametrize("bits", GOLDEN_VALUES, ids="{}-bit".format)
def test_values_match_the_golden_table(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    assert codes_to_values(codes, bits).tolist() == GOLDEN_VALUES[bits]


@pytest.mark.parametrize("bits", WIDTHS, ids="{}-bit".format)
def test_values_are_the_sum_over_bits_of_equation_1(bits: int) -> None:
    for code in range(1 << bits):
        by_bits = sum((2 * (code >> i & 1) - 1) * 2**i for i in range(bits))
        assert codes_to_values(torch.tensor(code, dtype=torch.uint8), bits).item() == by_bits


@pytest.mark.parametrize("bits", WIDTHS, ids="{}-bit".format)
def test_codes_survive_values_and_planes(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 37), dtype=torch.uint8)
    assert torch.equal(values_to_codes(codes_to_values(codes, bits), bits), codes)
    planes = pack_codes(codes, bits)
    assert planes.shape == (bits, 5, 5)
    assert torch.equal(unpack_codes(planes, 37), codes)


@pytest.mark.parametrize("value", [0, 2, 17, -17], ids="value {}".format)
def test_integers_without_a_code_are_refused(value: int) -> None:
    with pytest.raises(StatsError, match="odd integers from -15 to 15"):
        values_to_codes(torch.tensor([1, value]), 4)


@settings(max_examples=60)
@given(
    bits=st.integers(1, 8),
    step=st.floats(1e-3, 1e3),
    data=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=20),
)
def test_nearest_codes_are_nearest(bits: int, step: float, data: list[float]) -> None:
    x = torch.tensor(data)
    chosen = codes_to_values(nearest_codes(x, torch.tensor(step), bits), bits).double() * step
    levels = codes_to_values(torch.arange(1 << bits, dtype=torch.uint8), bits).double() * step
    best = (x.double()[:, None] - levels).abs().amin(dim=1)
    rounding = 1e-6 * (x.abs().double() + step * largest_value(bits))  # the division is in fp32
    assert ((x.double() - chosen).abs() <= best + rounding).all()


def test_a_row_of_zeros_has_step_0_and_a_value() -> None:
    codes, step = quantize_activations(torch.zeros(2, 8), torch.ones(1), 3, per_token=True)
    assert step.tolist() == [[0.0], [0.0]]
    assert torch.isfinite(codes_to_values(codes, 3).float() * step).all()


@pytest.mark.parametrize("per_token", [True, False], ids=["per_token", "per_tensor"])
def test_the_clip_range_maps_to_the_largest_value(per_token: bool) -> None:
    x = torch.tensor([[4.0, -4.0, 1.0], [8.0, 2.0, -8.0]])
    clip = torch.tensor([1.0 if per_token else 8.0])
    codes, step = quantize_activations(x, clip, 8, per_token)
    values = codes_to_values(codes, 8).float() * step
    assert values[1].tolist()[0] == pytest.approx(8.0, rel=1e-6)
    assert values[1].tolist()[2] == pytest.approx(-8.0, rel=1e-6)
    assert step.flatten().tolist() == pytest.approx([4 / 255 if per_token else 8 / 255, 8 / 255])


def test_zero_is_exact_and_both_ends_are_reached() -> None:
    x = torch.tensor([[0.0, 3.0, 0.0, -1.0], [5.0, 0.0, 1.0, 2.0], [-4.0, -0.5, 0.0, -2.0]])
    codes, step, zero = quantize_with_zero(x, torch.ones(1), 2)
    values = 2 * (codes.int() - zero) * step
    assert not values[x == 0].any()
    assert zero.flatten().tolist() == [1, 0, 3]
    assert codes.amax(1).tolist() == [3, 3, 3]
    assert codes.amin(1).tolist() == [0, 0, 0]


@settings(max_examples=60)
@given(bits=st.integers(1, 8), data=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
@example(bits=1, data=[2.0**-149])
def test_codes_with_a_zero_are_within_a_step_of_the_nearest(bits: int, data: list[float]) -> None:
    """All of the range is kept, so that the error is half a step of codes; the rounded zero point may add as much.

    A step below the least normal number has fewer digits, or none.
    """
    x = torch.tensor([data])
    codes, step, zero = quantize_with_zero(x, torch.ones(1), bits)
    error = (2.0 * (codes.double() - zero) * step - x.double()).abs()
    assert (error <= 2 * step.double() * (1 + 1e-5) + torch.finfo(torch.float32).tiny).all()


def test_a_row_of_zeros_has_zero_values_with_a_zero_point() -> None:
    codes, step, zero = quantize_with_zero(torch.zeros(2, 8), torch.ones(1), 3)
    assert not (codes.int() - zero).any()
    assert not step.any()


def test_a_rotated_weight_dequantizes_to_the_columns_of_the_input() -> None:
    spec, weight = BipolarSpec(8, 8, rotate_inputs=True), torch.randn(6, 64)
    scales = (rotate(weight).abs().amax(1, keepdim=True) / 255).half()
    tensors = {"bit_planes": pack_codes(nearest_codes(rotate(weight), scales.float(), 8), 8), "scales": scales}
    error = FORMATS["bipolar"].dequantize(spec, tensors, (6, 64)) - weight
    assert error.abs().max() < 2 * scales.max()


def test_older_versions_read_what_uses_nothing_new() -> None:
    assert spec_to_json(BipolarSpec(4, 8)).keys() == {
        "format",
        "weight_bits",
        "act_bits",
        "group_size",
        "act_granularity",
    }
    spec = BipolarSpec(4, 8, act_zero=True, rotate_inputs=True)
    assert spec_from_json(spec_to_json(spec)) == spec


def test_dequantize_scales_each_group_of_columns() -> None:
    codes = torch.tensor([[0] * 8 + [3] * 4], dtype=torch.uint8)
    weight = dequantize_bipolar(pack_codes(codes, 2), torch.tensor([[0.5, 2.0]]), 12, group_size=8)
    assert weight.tolist() == [[-1.5] * 8 + [6.0] * 4]


def test_tensors_and_size_follow_the_spec() -> None:
    spec = BipolarSpec(weight_bits=3, act_bits=4, group_size=64)
    tensors = bipolar_tensors(spec, (10, 72))
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "bit_planes": (3, 10, 9),
        "scales": (10, 2),
        "act_clip": (1,),
    }
    assert stored_bytes(spec, (10, 72)) == 3 * 10 * 9 + 10 * 2 * 2 + 4
    assert "act_clip" not in bipolar_tensors(BipolarSpec(3, 16), (10, 72))


def test_spec_survives_json_and_refuses_impossible_values() -> None:
    spec = BipolarSpec(2, 8, 128, "per_tensor")
    assert spec_from_json(spec_to_json(spec)) == spec
    with pytest.raises(CheckpointError, match="act_bits is 9"):
        spec_from_json({"format": "bipolar", "weight_bits": 2, "act_bits": 9})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight_bits": 9, "act_bits": 4}, "weight_bits is 9"),
        ({"weight_bits": 4, "act_bits": 0}, "act_bits is 0"),
        ({"weight_bits": 4, "act_bits": 4, "group_size": 12}, "group_size is 12"),
        ({"weight_bits": 4, "act_bits": 4, "act_granularity": "per_row"}, "act_granularity is 'per_row'"),
        ({"weight_bits": 4, "act_bits": 16, "rotate_inputs": True}, "for quantized activations"),
        ({"weight_bits": 4, "act_bits": 4, "scale_bits": 4}, "scale_bits is 4"),
        ({"weight_bits": 7, "act_bits": 8, "scale_bits": 8}, "weight_bits from 1 to 6, not 7"),
        (
            {"weight_bits": 4, "act_bits": 4, "act_granularity": "per_tensor", "act_zero": True},
            "each token's own range",
        ),
    ],
    ids=[
        *("weight_bits", "act_bits", "group_size", "act_granularity"),
        *("weight only", "scale_bits", "codes of 7 bits", "zero per tensor"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        BipolarSpec(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", range(1, MOST_CODED_BITS + 1))
def test_a_scale_code_times_a_value_is_a_signed_byte_and_the_kernels_byte(bits: int) -> None:
    """ScaleCode in planes.cuh: 2 s u + 128 - s (2^p - 1), for four codes in a word, without a carry between bytes."""
    values = codes_to_values(torch.arange(1 << bits), bits).int()
    for scale in range(largest_scale(bits) + 1):
        assert (values * scale).abs().max() <= LARGEST_BYTE
        offset = (128 - scale * largest_value(bits)) * 0x01010101
        for u in (0, 1, (1 << bits) - 1):
            word = u | ((1 << bits) - 1) << 8 | u << 24
            found = (word * 2 * scale + offset) % (1 << 32)
            expected = [values[word >> 8 * i & 0xFF] * scale + 128 for i in range(4)]
            assert [found >> 8 * i & 0xFF for i in range(4)] == expected


def test_scale_codes_count_in_the_factor_of_their_row() -> None:
    spec, shape = BipolarSpec(2, 8, 8, scale_bits=8), (2, 12)
    codes = torch.tensor([[0] * 8 + [3] * 4, [1] * 12], dtype=torch.uint8)
    tensors = {
        "bit_planes": pack_codes(codes, 2),
        "scales": torch.tensor([[1, 42], [7, 0]], dtype=torch.uint8),
        "scale_factors": torch.tensor([[0.5], [0.25]]).half(),
    }
    declared = bipolar_tensors(spec, shape)
    assert {name: (declared[name].shape, declared[name].dtype) for name in tensors} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }
    weight = FORMATS["bipolar"].dequantize(spec, tensors, shape)
    assert weight.tolist() == [[-1.5] * 8 + [63.0] * 4, [-1.75] * 8 + [0.0] * 4]
    assert declared["scales"].holds(tensors["scales"])
    assert not declared["scales"].holds(torch.tensor([[43]], dtype=torch.uint8))
    assert spec_from_json(spec_to_json(spec)) == spec


def test_sums_that_could_overflow_are_refused() -> None:
    check_exact(8, 8, 33024)
    check_exact(8, 8, 16512, act_zero=True)
    check_exact(1, 8, 33000, coded=True)
    with pytest.raises(RecipeError, match="W1A8 over 33500 columns"):
        check_exact(1, 8, 33500, coded=True)
    with pytest.raises(RecipeError, match="W8A8 over 16514 columns"):
        check_exact(8, 8, 16514, act_zero=True)
    with pytest.raises(RecipeError, match="W8A8 over 33026 columns"):
        check_exact(8, 8, 33026)
