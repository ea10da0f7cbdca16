from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats.bcq import (
    FORMAT,
    ROW_WISE,
    SCALE_BITS,
    BcqSpec,
    BcqTensors,
    dequantize_stored,
    group_count,
    group_width,
)
from quantkit.formats.hadamard import rotate
from quantkit.formats.planes import pack_codes
from quantkit.formats.table import spec_from_json, spec_to_json, stored_bytes
from tests.formats.test_shard import random_tensors

SPEC = BcqSpec(weight_bits=2, group_size=8, offset=True)
FP32_ATOL = 1e-6  # rounding of one fp32 product, as a share of its norm


def test_dequantize_is_scales_times_signs_plus_offset_per_group() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 3, 0]])  # K = 10: a group of 8 and one of 2
    tensors = {
        "signs": pack_codes(codes, 2),
        "scales": torch.tensor([[[1.0, 10.0]], [[4.0, 20.0]]], dtype=torch.float16),
        "offset": torch.tensor([[0.5, 100.0]], dtype=torch.float16),
    }
    weight = FORMAT.dequantize(SPEC, tensors, (1, 10))
    first = [-4.5, -2.5, 3.5, 5.5]  # -1-4, +1-4, -1+4, +1+4, each + 0.5
    assert weight.tolist() == [[*first, *first, 130.0, 70.0]]


def test_coded_scales_count_in_their_rows_factor() -> None:
    codes = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 3, 0], [3] * 10])
    tensors = {
        "signs": pack_codes(codes, 2),
        "scales": torch.tensor([[[8, 80], [255, 0]], [[32, 160], [1, 0]]], dtype=torch.uint8),
        "offset": torch.tensor([[4, 127], [-128, -1]], dtype=torch.int8),
        "scale_factors": torch.tensor([[0.125], [3.0]], dtype=torch.float16),
    }
    weight = FORMAT.dequantize(BcqSpec(2, 8, True, scale_bits=8), tensors, (2, 10))
    first = [-4.5, -2.5, 3.5, 5.5]  # (-8-32+4) / 8, (8-32+4) / 8, ...
    assert weight[0].tolist() == [*first, *first, (80 + 160 + 127) / 8, (127 - 80 - 160) / 8]
    assert weight[1].tolist() == [3.0 * (255 + 1 - 128)] * 8 + [-3.0] * 2


@pytest.mark.parametrize("offset", [True, False], ids=["offset", "no-offset"])
@pytest.mark.parametrize("bits", [1, 4, 8], ids="q{}".format)
def test_coded_scales_decode_exactly_at_every_factor(bits: int, offset: bool) -> None:
    """Every positive fp16 number as a factor, from the smallest denormal to the largest: fp32 rounds nothing."""
    factors = torch.arange(1, 0x7C00, 31, dtype=torch.int16).view(torch.float16)[:, None]
    rows, columns = len(factors), 24
    codes = torch.randint(0, 2**bits, (rows, columns))
    scales = torch.randint(0, 256, (bits, rows, 3), dtype=torch.uint8)
    scales[:, ::2] = 255
    shifts = torch.randint(-128, 128, (rows, 3), dtype=torch.int8)
    stored = BcqTensors(pack_codes(codes, bits), scales, shifts if offset else None, factors)
    planes = torch.stack([((codes >> i) & 1).double() * 2 - 1 for i in range(bits)])
    whole = (planes * scales.double().repeat_interleave(8, dim=2)).sum(dim=0)
    if offset:
        whole += shifts.double().repeat_interleave(8, dim=1)
    assert torch.equal(dequantize_stored(stored, columns, 8).double(), whole * factors.double())


@pytest.mark.parametrize(
    ("group_size", "columns", "width", "count"),
    [(128, 576, 128, 5), (64, 576, 64, 9), (ROW_WISE, 576, 576, 1), (128, 96, 96, 1)],
    ids=["short-last", "even", "row-wise", "wider-than-row"],
)
def test_groups_cover_the_row(group_size: int, columns: int, width: int, count: int) -> None:
    assert (group_width(group_size, columns), group_count(group_size, columns)) == (width, count)


@pytest.mark.parametrize("weight_bits", [0, 9, -1])
def test_spec_refuses_bits_outside_1_to_8(weight_bits: int) -> None:
    with pytest.raises(RecipeError, match="choose 1 to 8"):
        BcqSpec(weight_bits=weight_bits, group_size=128, offset=True)


@pytest.mark.parametrize("group_size", [0, 12, -8, 127])
def test_spec_refuses_group_sizes_off_the_grid(group_size: int) -> None:
    with pytest.raises(RecipeError, match="multiple of 8"):
        BcqSpec(weight_bits=4, group_size=group_size, offset=True)


@pytest.mark.parametrize("scale_bits", [0, 4, 12, 32])
def test_spec_refuses_other_scale_bits(scale_bits: int) -> None:
    with pytest.raises(RecipeError, match=r"scale_bits is \d+; choose 16 .* or 8"):
        BcqSpec(weight_bits=4, group_size=128, offset=True, scale_bits=scale_bits)


def test_stored_bytes_match_the_size_model() -> None:
    # q (1 + 16 / g) + 16 / g bits per weight with an offset: 4 (1 + 1/8) + 1/8 at q = 4, g = 128
    assert 8 * stored_bytes(BcqSpec(4, 128, True), (512, 1024)) == 4.625 * 512 * 1024
    assert 8 * stored_bytes(BcqSpec(4, 128, False), (512, 1024)) == 4.5 * 512 * 1024
    # q (1 + 8 / g) + 8 / g, and 16 a row, with 8-bit scales
    assert 8 * stored_bytes(BcqSpec(4, 64, True, 8), (512, 1024)) == (4.625 * 1024 + 16) * 512
    assert 8 * stored_bytes(BcqSpec(4, 64, False, 8), (512, 1024)) == (4.5 * 1024 + 16) * 512


@pytest.mark.parametrize("scale_bits", SCALE_BITS, ids="s{}".format)
def test_spec_survives_json(scale_bits: int) -> None:
    spec = replace(SPEC, scale_bits=scale_bits)
    assert spec_from_json(spec_to_json(spec)) == spec


def test_fp16_scales_are_written_as_before_coded_ones_existed() -> None:
    entry = {"format": "bcq", "weight_bits": 2, "group_size": 8, "offset": True}
    assert spec_to_json(SPEC) == entry
    assert spec_from_json(entry) == SPEC


def test_a_rotated_weight_dequantizes_to_the_columns_of_the_input() -> None:
    spec = BcqSpec(2, 16, True, rotate_inputs=True)
    assert spec_from_json(spec_to_json(spec)) == spec
    tensors = random_tensors(spec, (6, 24))
    x, planes = torch.randn(5, 24), dequantize_stored(BcqTensors.of(tensors), 24, 16)
    got = x @ FORMAT.dequantize(spec, tensors, (6, 24)).T
    torch.testing.assert_close(got, rotate(x) @ planes.T, rtol=0, atol=FP32_ATOL * float(planes.norm()))
    assert torch.equal(FORMAT.dequantize(replace(spec, rotate_inputs=False), tensors, (6, 24)), planes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "gif"}, "unknown format"),
        ({"sparsity": 2}, "unknown field"),
        ({"weight_bits": 9}, "choose 1 to 8"),
        ({"scale_bits": "8"}, "scale_bits is .8., not int"),
    ],
    ids=["format", "field", "value", "scale-bits"],
)
def test_spec_from_json_refuses_what_it_does_not_know(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_json({**spec_to_json(SPEC), **change})
