"""The trellis format: its definition by loops, what it refuses, and binary coding as its special case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats import bcq
from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.hadamard import rotate
from quantkit.formats.planes import pack_codes, unpack_codes, unpack_signs
from quantkit.formats.table import spec_from_json, spec_to_json, stored_bytes
from quantkit.formats.trellis import (
    BLOCK_ROWS,
    FORMAT,
    TrellisSpec,
    TrellisTensors,
    dequantize_stored,
    filter_rows,
)
from tests.formats.test_shard import random_tensors

SPEC = TrellisSpec(weight_bits=2, taps=4)
FP32_RTOL = 1e-6  # of a sum of at most 16 fp32 products
FP32_ATOL = 1e-6  # rounding of one fp32 product, as a share of its norm


def by_loops(tensors: dict[str, Tensor], columns: int) -> Tensor:
    """The module's formula, element by element in fp64."""
    codes = unpack_codes(tensors["signs"], columns).tolist()
    filter, scales = tensors["filter"].double().tolist(), tensors["scales"].double().flatten().tolist()
    rows, weight = len(codes), torch.zeros(len(codes), columns, dtype=torch.float64)
    for n in range(rows):
        block = n - n % BLOCK_ROWS
        ring = min(BLOCK_ROWS, rows - block)
        for k in range(columns):
            for i, taps in enumerate(filter):
                for d, tap in enumerate(taps):
                    code = codes[block + (n - d - block) % ring][k]
                    weight[n, k] += tap * (2 * (code >> i & 1) - 1)
            weight[n, k] *= scales[n]
    return weight


@pytest.mark.parametrize("rows", [16, 32, 48, 64, 144], ids="N{}".format)
@pytest.mark.parametrize(
    ("bits", "taps"), [(1, 1), (1, 8), (2, 4), (3, 3), (6, 2)], ids=["q1t1", "q1t8", "q2t4", "q3t3", "q6t2"]
)
def test_dequantize_is_the_definition(bits: int, taps: int, rows: int) -> None:
    spec, columns = TrellisSpec(bits, taps), 11
    tensors = random_tensors(spec, (rows, columns))
    tensors["filter"] = torch.randn(bits, taps)
    expected = by_loops(tensors, columns)
    got = FORMAT.dequantize(spec, tensors, (rows, columns))
    torch.testing.assert_close(got.double(), expected, rtol=FP32_RTOL, atol=FP32_RTOL * float(expected.abs().max()))


def test_a_sign_acts_on_the_rows_behind_it_round_its_ring() -> None:
    codes = torch.zeros(80, 1, dtype=torch.uint8)
    codes[[63, 79]] = 1  # the last rows of a ring of 64 and of one of 16
    tensors = {
        "signs": pack_codes(codes, 1),
        "scales": torch.ones(80, 1, dtype=torch.float16),
        "filter": torch.tensor([[4.0, 2.0, 1.0]]),
    }
    weight = FORMAT.dequantize(TrellisSpec(1, 3), tensors, (80, 1)).flatten()
    changed = {63: 1.0, 0: -3.0, 1: -5.0, 79: 1.0, 64: -3.0, 65: -5.0}  # -7, and twice the tap of the sign
    assert weight.tolist() == [changed.get(row, -7.0) for row in range(80)]


@pytest.mark.parametrize("bits", [1, 2, 4], ids="q{}".format)
def test_one_tap_is_binary_coding_with_scales_of_rows(bits: int) -> None:
    tensors = random_tensors(TrellisSpec(bits, 1), (48, 40))
    tensors["filter"] = 2.0 ** torch.arange(bits)[:, None]  # products with powers of two are exact
    coded = {"signs": tensors["signs"], "scales": (tensors["filter"][:, :, None] * tensors["scales"].float()).half()}
    got = FORMAT.dequantize(TrellisSpec(bits, 1), tensors, (48, 40))
    torch.testing.assert_close(
        got, bcq.FORMAT.dequantize(BcqSpec(bits, ROW_WISE, False), coded, (48, 40)), rtol=FP32_RTOL, atol=0
    )


@pytest.mark.parametrize("bits", [0, 7, -1])
def test_spec_refuses_bits_outside_1_to_6(bits: int) -> None:
    with pytest.raises(RecipeError, match=f"weight_bits is {bits}; method trellis has 1 to 6"):
        TrellisSpec(bits, 2)


@pytest.mark.parametrize("taps", [0, 9, -1])
def test_spec_refuses_taps_outside_1_to_8(taps: int) -> None:
    with pytest.raises(RecipeError, match=f"taps is {taps}; choose 1 to 8"):
        TrellisSpec(2, taps)


@pytest.mark.parametrize(("bits", "taps"), [(6, 3), (3, 6), (4, 5)])
def test_spec_refuses_windows_of_more_than_16_bits(bits: int, taps: int) -> None:
    with pytest.raises(RecipeError, match=f"window of {bits * taps} bits; choose at most 16"):
        TrellisSpec(bits, taps)


@pytest.mark.parametrize("rows", [1, 8, 24, 100])
def test_other_rows_than_a_multiple_of_16_are_refused_in_one_line(rows: int) -> None:
    with pytest.raises(RecipeError, match=f"multiple of 16, not {rows}") as refused:
        FORMAT.tensors(SPEC, (rows, 64))
    assert "\n" not in str(refused.value)
    with pytest.raises(RecipeError, match=f"multiple of 16, not {rows}"):
        filter_rows(torch.zeros(2, rows, 8), torch.ones(2, 4))


def test_stored_bytes_are_the_planes_and_a_scale_for_each_row() -> None:
    assert stored_bytes(SPEC, (512, 1024)) == 2 * 512 * 1024 // 8 + 2 * 512 + 4 * 2 * 4


def test_the_filter_does_not_grow_with_the_weight() -> None:
    few, many = (FORMAT.tensors(SPEC, shape)["filter"] for shape in ((16, 8), (512, 1024)))
    assert few == many


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
def test_spec_survives_json(rotated: bool) -> None:
    spec = replace(SPEC, rotate_inputs=rotated)
    entry = {"format": "trellis", "weight_bits": 2, "taps": 4, "rotate_inputs": rotated}
    assert spec_to_json(spec) == entry
    assert spec_from_json(entry) == spec


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 64}, "unknown field"),
        ({"taps": 9}, "choose 1 to 8"),
        ({"weight_bits": 2.0}, "weight_bits is 2.0, not int"),
    ],
    ids=["field", "value", "type"],
)
def test_spec_from_json_refuses_what_it_does_not_know(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_json({**spec_to_json(SPEC), **change})


def test_a_rotated_weight_dequantizes_to_the_columns_of_the_input() -> None:
    spec = replace(SPEC, rotate_inputs=True)
    tensors = random_tensors(spec, (32, 24))
    x, planes = torch.randn(5, 24), dequantize_stored(TrellisTensors.of(tensors), 24)
    got = x @ FORMAT.dequantize(spec, tensors, (32, 24)).T
    torch.testing.assert_close(got, rotate(x) @ planes.T, rtol=0, atol=FP32_ATOL * float(planes.norm()))
    assert torch.equal(FORMAT.dequantize(SPEC, tensors, (32, 24)), planes)


def test_filtering_planes_is_filtering_their_product() -> None:
    """What the kernels use: scales * filter(signs x) = w x."""
    tensors = random_tensors(SPEC, (80, 40))
    x = torch.randn(40, 3)
    behind = filter_rows(unpack_signs(tensors["signs"], 40) @ x, tensors["filter"]) * tensors["scales"].float()
    weight = FORMAT.dequantize(SPEC, tensors, (80, 40))
    torch.testing.assert_close(behind, weight @ x, rtol=0, atol=FP32_ATOL * float(weight.norm() * x.norm()))
