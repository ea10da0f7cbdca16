from __future__ import annotations

import pytest
import torch

from quantkit.errors import CheckpointError, RecipeError
from quantkit.formats.bcq import FORMAT, ROW_WISE, BcqSpec, group_count, group_width
from quantkit.formats.planes import pack_codes
from quantkit.formats.table import spec_from_json, spec_to_json, stored_bytes

SPEC = BcqSpec(weight_bits=2, group_size=8, offset=True)


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


def test_stored_bytes_match_the_size_model() -> None:
    # q (1 + 16 / g) + 16 / g bits per weight with an offset: 4 (1 + 1/8) + 1/8 at q = 4, g = 128
    assert 8 * stored_bytes(BcqSpec(4, 128, True), (512, 1024)) == 4.625 * 512 * 1024
    assert 8 * stored_bytes(BcqSpec(4, 128, False), (512, 1024)) == 4.5 * 512 * 1024


def test_spec_survives_json() -> None:
    assert spec_from_json(spec_to_json(SPEC)) == SPEC


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "gif"}, "unknown format"),
        ({"sparsity": 2}, "unknown field"),
        ({"weight_bits": 9}, "choose 1 to 8"),
    ],
    ids=["format", "field", "value"],
)
def test_spec_from_json_refuses_what_it_does_not_know(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_json({**spec_to_json(SPEC), **change})
