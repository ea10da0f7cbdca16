"""Instances of the bcq kernels: what decides them, and that each fits a GPU."""

from __future__ import annotations

import pytest

from quantkit.cuda.device import shared_limit
from quantkit.errors import KernelError
from quantkit.ops.bcq.instances import (
    LUT_SHARED,
    SEGMENTS,
    GemvCase,
    gemv_case,
    gemv_tile,
    lut_residency,
    segment_columns,
)
from quantkit.ops.instances import COMPILED_CAPABILITIES

IDS = [f"sm_{major}{minor}" for major, minor in COMPILED_CAPABILITIES]


@pytest.mark.parametrize(
    ("group_size", "columns"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128), (512, 256)]
)
def test_segment_is_the_widest_that_divides_the_group(group_size: int, columns: int) -> None:
    assert segment_columns(group_size) == columns


@pytest.mark.parametrize(
    ("segment", "tokens", "expected"),
    [
        *[(256, 1, (128, 4)), (128, 2, (128, 4)), (128, 4, (128, 4)), (64, 5, (64, 8)), (32, 30, (32, 8))],
        *[(64, 1, (64, 1)), (32, 2, (32, 2)), (32, 3, (32, 4))],
    ],
)
def test_int8_takes_four_or_eight_tokens_fewer_of_narrow_groups_and_segments_whose_sums_are_exact(
    segment: int, tokens: int, expected: tuple[int, int]
) -> None:
    case = gemv_case(3, segment, 16, tokens, int8=True)
    assert (case.segment, case.tokens) == expected
    largest_code = 2**15 - 1
    assert case.segment * largest_code < 2**22  # what fits between the powers of two around 1.5 * 2^23


def test_groups_of_no_whole_word_have_no_segment() -> None:
    with pytest.raises(KernelError, match="multiple of 32, not 40"):
        segment_columns(40)


def test_layouts_keep_two_slots_even_where_memory_is_short() -> None:
    for capability in COMPILED_CAPABILITIES:
        assert all(gemv_tile(GemvCase(8, segment, 16, 2), capability).depth >= 2 for segment in SEGMENTS)


@pytest.mark.parametrize(("capability", "most"), [((8, 0), 2), ((8, 6), 1), ((8, 9), 1), ((9, 0), 3)], ids=IDS)
def test_look_up_blocks_share_a_multiprocessor(capability: tuple[int, int], most: int) -> None:
    counts = {lut_residency(bits, fine, capability) for bits in range(1, 9) for fine in (False, True)}
    assert max(counts) == most
    assert all(shared_limit(*capability, count) >= LUT_SHARED for count in counts)
