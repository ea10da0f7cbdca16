"""Instances of the bcq kernels: what decides them, and that each fits a GPU."""

from __future__ import annotations

import importlib.util

import pytest

from quantkit.cuda.architectures import ARCHITECTURES, Architecture, architecture
from quantkit.cuda.compile import CompileUnit, compile_units
from quantkit.cuda.source import KernelSource
from quantkit.errors import KernelError
from quantkit.formats.bcq import SCALE_BITS
from quantkit.ops.bcq.instances import (
    BINARY_PRODUCTS,
    INT8_PRODUCTS,
    LUT_SHARED,
    SEGMENTS,
    GemvCase,
    gemv_case,
    gemv_tile,
    lut_residency,
    segment_width,
)

ROWS = [pytest.param(row, id=row.title) for row in ARCHITECTURES.values()]


@pytest.mark.parametrize(
    ("group_size", "width"), [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128), (512, 256)]
)
def test_segment_is_the_widest_that_divides_the_group(group_size: int, width: int) -> None:
    assert segment_width(group_size) == width


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
        segment_width(40)


@pytest.mark.parametrize("row", ROWS)
def test_layouts_keep_two_stages_even_where_memory_is_short(row: Architecture) -> None:
    assert all(gemv_tile(GemvCase(8, segment, 16, 2), row).stages >= 2 for segment in SEGMENTS)


@pytest.mark.parametrize("row", ROWS)
def test_look_up_blocks_share_a_multiprocessor_as_its_memory_allows(row: Architecture) -> None:
    counts = {lut_residency(bits, fine, row) for bits in range(1, 9) for fine in (False, True)}
    assert max(counts) == min(3, row.shared_memory // (LUT_SHARED + 1024))
    assert all(row.shared_limit(count) >= LUT_SHARED for count in counts)


@pytest.mark.skipif(importlib.util.find_spec("cupy_backends") is None, reason="CuPy is not installed")
@pytest.mark.parametrize("int8", [False, True], ids=["binary", "int8"])
def test_the_hosts_sizes_are_the_kernels(int8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory is planned by these formulas; the kernels' own types say whether they are right."""
    cases = {
        gemv_case(bits, segment, scale_bits, tokens, int8=int8)
        for bits in (1, 3, 8)
        for segment in SEGMENTS
        for scale_bits in SCALE_BITS
        for tokens in (1, 2, 4, 8)
    }
    claims, step_tiles = [], 2
    for case in cases:
        numbers = case.weight_bits, case.segment, case.scale_bits, case.tokens, step_tiles
        product = f"{'Int8' if int8 else 'Binary'}Product<{', '.join(map(str, numbers))}>"
        records = f"{product}::Record::kBytes * ({product}::kTokens / {product}::kSetTokens)"
        claims.append(f"static_assert({records} == {case.record_bytes});")
        for offset in (0, 1):
            shape = f"{product}::Shape"
            stage = f"{shape}::kSignBytes + {shape}::kStepSegments * {shape}::groupVectors({offset}) * kVectorBytes"
            claims.append(f"static_assert({stage} == {step_tiles * case.tile_bytes(case.weight_bits + offset)});")
    source = INT8_PRODUCTS.source if int8 else BINARY_PRODUCTS.source
    monkeypatch.setattr(KernelSource, "text", "\n".join([source.text, *claims, "__global__ void probe() {}"]))
    assert compile_units([CompileUnit(source, "probe")], architecture(9, 0)).image
