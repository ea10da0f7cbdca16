"""Shards: every part of a weight is, bit for bit, that part of the whole; and what cannot be cut is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.bipolar import BipolarSpec
from quantkit.formats.flatten import FlattenSpec, check_columns, pack_nibbles, padded_columns
from quantkit.formats.shard import join, shard, shard_spec
from quantkit.formats.table import FORMATS, format_name
from quantkit.formats.trellis import TrellisSpec

N, K = 48, 192
SPECS = {
    "bcq": BcqSpec(3, 64, True),
    "bcq-symmetric": BcqSpec(2, 48, False),
    "bcq-row": BcqSpec(4, -1, True),
    "bcq-wide-group": BcqSpec(4, 256, True),
    "bcq-short-last-group": BcqSpec(2, 128, True),
    "bcq-scales8": BcqSpec(4, 64, True, scale_bits=8),
    "bipolar-w4a8": BipolarSpec(4, 8),
    "bipolar-w3a16-g64": BipolarSpec(3, 16, 64),
    "bipolar-w4a8-g64-scales8": BipolarSpec(4, 8, 64, scale_bits=8),
    "flatten-w8a8": FlattenSpec(8, 8, 256),
    "flatten-w4a4": FlattenSpec(4, 4, 256),
    "flatten-smooth": FlattenSpec(8, 8, 256, smooth=True),
}
TRELLIS = TrellisSpec(2, 4)
TRELLIS_ROWS = 64 * 3 + 32  # whole rings and a shorter last one


def random_tensors(spec: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    """A weight of the format with values of every kind; of flatten some channels have further columns."""
    tensors = {}
    for name, stored in FORMATS[format_name(spec)].tensors(spec, shape).items():
        if stored.dtype.is_floating_point:
            tensors[name] = torch.rand(stored.shape).to(stored.dtype) + 0.5
        else:
            least = torch.iinfo(stored.dtype).min if stored.dtype == torch.int8 else 0
            most = least + 255 if stored.largest is None else stored.largest
            tensors[name] = torch.randint(least, most + 1, stored.shape).to(stored.dtype)
    if isinstance(spec, FlattenSpec):
        further = spec.extended_channels - shape[1] - 8
        split = torch.randint(0, shape[1], (further,)).sort().values.int()
        zeros = torch.zeros(8, dtype=torch.int32)
        tensors["source_channel"] = torch.cat([torch.arange(shape[1], dtype=torch.int32), split, zeros])
        # without weight slices, a channel's further columns are its second, third, ... slices
        segments = [int((split[:index] == channel).sum()) + 1 for index, channel in enumerate(split)]
        tensors["source_segment"] = torch.cat([torch.zeros(shape[1]), torch.tensor(segments), zeros]).int()
        codes = torch.randint(-7, 8, (shape[0], spec.extended_channels), dtype=torch.int8)
        codes[:, -8:] = 0
        tensors["codes"] = pack_nibbles(codes) if spec.weight_bits == 4 else codes
    return tensors


def dequantize(spec: Any, tensors: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    row = FORMATS[format_name(spec)]
    for name, stored in row.tensors(spec, shape).items():
        assert (tuple(tensors[name].shape), tensors[name].dtype) == (stored.shape, stored.dtype), name
    return row.dequantize(spec, tensors, shape)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_shard_is_that_part_of_the_whole(spec: Any, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 3)))
    tensors = random_tensors(spec, (N, K))
    rows = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, N - 1))
        rows.append((start, data.draw(st.integers(start + 1, N))))
    start = data.draw(st.integers(0, K // 8 - 1)) * 8
    end = data.draw(st.integers(start // 8 + 1, K // 8)) * 8
    own, kept = shard(spec, tensors, (N, K), out_spans=rows, in_span=(start, end))
    expected = torch.cat([dequantize(spec, tensors, (N, K))[a:b, start:end] for a, b in rows])
    assert torch.equal(dequantize(own, kept, tuple(expected.shape)), expected)
    if isinstance(own, FlattenSpec):
        check_columns(own, kept, tuple(expected.shape))
    else:
        assert shard_spec(spec, K, (start, end)) == own


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("spec", [*SPECS.values(), TRELLIS], ids=[*SPECS, "trellis"])
def test_shards_along_k_add_up_to_the_whole_product(spec: Any, ranks: int) -> None:
    tensors, part = random_tensors(spec, (N, K)), K // ranks
    x = torch.randint(-3, 4, (5, K)).double()
    whole = x @ dequantize(spec, tensors, (N, K)).double().T
    total = torch.zeros_like(whole)
    for start in range(0, K, part):
        own, kept = shard(spec, tensors, (N, K), out_spans=[(0, N)], in_span=(start, start + part))
        total += x[:, start : start + part] @ dequantize(own, kept, (N, part)).double().T
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_shards_along_n_and_k_together_are_the_stored_weight(spec: Any, ranks: int) -> None:
    tensors = random_tensors(spec, (N, K))
    whole = dequantize(spec, tensors, (N, K))
    for rank in range(ranks):
        rows, columns = (rank * N // ranks, (rank + 1) * N // ranks), (rank * K // ranks, (rank + 1) * K // ranks)
        own, kept = shard(spec, tensors, (N, K), out_spans=[rows], in_span=(0, K))
        assert torch.equal(dequantize(own, kept, (rows[1] - rows[0], K)), whole[slice(*rows)])
        own, kept = shard(spec, tensors, (N, K), out_spans=[(0, N)], in_span=columns)
        assert torch.equal(dequantize(own, kept, (N, columns[1] - columns[0])), whole[:, slice(*columns)])


def test_flatten_shards_share_out_every_column_that_carries_weight() -> None:
    spec = SPECS["flatten-w8a8"]
    tensors = random_tensors(spec, (N, K))
    kept = [shard(spec, tensors, (N, K), out_spans=[(0, N)], in_span=(at, at + 96)) for at in (0, 96)]
    columns = sum(int(part["codes"].ne(0).any(0).sum()) for _, part in kept)
    assert columns == int(tensors["codes"].ne(0).any(0).sum())
    assert all(own.extended_channels == padded_columns(own.extended_channels) for own, _ in kept)


def test_whole_groups_keep_their_size_and_cut_ones_are_split() -> None:
    spec = BcqSpec(2, 64, True)
    tensors = random_tensors(spec, (N, K))
    sizes = [
        shard(spec, tensors, (N, K), out_spans=[(0, N)], in_span=span)[0].group_size
        for span in ((64, 192), (0, 96), (96, 192))
    ]
    assert sizes == [64, 32, 32]


ROTATED = {
    "bipolar": BipolarSpec(4, 8, act_zero=True, rotate_inputs=True),
    "bcq": BcqSpec(3, ROW_WISE, True, scale_bits=8, rotate_inputs=True),
    "trellis": TrellisSpec(3, 3, rotate_inputs=True),
    "flatten": FlattenSpec(8, 8, 1024 + 32, rotate_inputs=True),
}


@pytest.mark.parametrize("spec", ROTATED.values(), ids=ROTATED)
def test_rotated_columns_are_cut_between_blocks_only(spec: Any) -> None:
    shape = (N, 1024)
    tensors = random_tensors(spec, shape)
    whole = dequantize(spec, tensors, shape)
    own, kept = shard(spec, tensors, shape, out_spans=[(0, N)], in_span=(512, 1024))
    assert own == shard_spec(spec, 1024, (512, 1024))
    assert own == (replace(spec, extended_channels=512 + 32) if isinstance(spec, FlattenSpec) else spec)
    assert torch.equal(dequantize(own, kept, (N, 512)), whole[:, 512:])
    for span in ((0, 128), (128, 1024)):
        with pytest.raises(CheckpointError, match="over which the input is rotated"):
            shard(spec, tensors, shape, out_spans=[(0, N)], in_span=span)
        with pytest.raises(CheckpointError, match="over which the input is rotated"):
            shard_spec(spec, 1024, span)


@pytest.mark.parametrize("spec", [SPECS["bcq"], TRELLIS], ids=["bcq", "trellis"])
@pytest.mark.parametrize("columns", [(4, 192), (0, 12)], ids=["start", "end"])
def test_a_cut_within_a_byte_is_refused(spec: Any, columns: tuple[int, int]) -> None:
    with pytest.raises(CheckpointError, match="within a byte"):
        shard(spec, random_tensors(spec, (N, K)), (N, K), out_spans=[(0, N)], in_span=columns)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_joined_shards_are_the_whole(spec: Any) -> None:
    tensors = random_tensors(spec, (N, K))
    parts = [shard(spec, tensors, (N, K), out_spans=[span], in_span=(0, K))[1] for span in ((0, 5), (5, 8), (8, N))]
    joined = join(spec, parts, K)
    assert joined is not None
    assert all(torch.equal(joined[name], tensor) for name, tensor in tensors.items())


def test_weights_that_differ_in_what_they_share_are_not_joined() -> None:
    spec = SPECS["flatten-w8a8"]
    first = random_tensors(spec, (N, K))
    assert join(spec, [first, {**first, "weight_scale": first["weight_scale"] * 2}], K) is None


@settings(max_examples=40)
@given(data=st.data())
def test_a_trellis_shard_of_whole_rings_is_that_part_of_the_whole(data: st.DataObject) -> None:
    spec, shape = TrellisSpec(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))), (TRELLIS_ROWS, K)
    torch.manual_seed(data.draw(st.integers(0, 3)))
    tensors = random_tensors(spec, shape)
    rows = []
    for _ in range(data.draw(st.integers(0, 2))):
        start = data.draw(st.integers(0, 2))
        rows.append((64 * start, 64 * data.draw(st.integers(start + 1, 3))))
    last = data.draw(st.integers(0, 3))
    rows.append((64 * last, min(64 * data.draw(st.integers(last + 1, 4)), TRELLIS_ROWS)))
    start = data.draw(st.integers(0, K // 8 - 1)) * 8
    end = data.draw(st.integers(start // 8 + 1, K // 8)) * 8
    own, kept = shard(spec, tensors, shape, out_spans=rows, in_span=(start, end))
    assert own == spec == shard_spec(spec, K, (start, end))
    expected = torch.cat([dequantize(spec, tensors, shape)[a:b, start:end] for a, b in rows])
    assert torch.equal(dequantize(own, kept, tuple(expected.shape)), expected)


@pytest.mark.parametrize(
    "rows",
    [[(32, 128)], [(0, 96)], [(0, 16)], [(192, 208)], [(192, TRELLIS_ROWS), (0, 64)]],
    ids=["start", "end", "within", "within-last", "last-before-others"],
)
def test_trellis_rows_that_cut_a_ring_are_refused(rows: list[tuple[int, int]]) -> None:
    shape = (TRELLIS_ROWS, K)
    with pytest.raises(CheckpointError, match=r"rows \d+ to \d+ of 224 cuts a block of 64 rows"):
        shard(TRELLIS, random_tensors(TRELLIS, shape), shape, out_spans=rows, in_span=(0, K))


def test_trellis_weights_are_joined_where_rings_stay_whole_and_filters_are_equal() -> None:
    tensors = random_tensors(TRELLIS, (TRELLIS_ROWS, K))
    first, last = (
        shard(TRELLIS, tensors, (TRELLIS_ROWS, K), out_spans=[span], in_span=(0, K))[1]
        for span in ((0, 128), (128, TRELLIS_ROWS))
    )
    joined = join(TRELLIS, [first, last], K)
    assert joined is not None
    assert all(torch.equal(joined[name], tensor) for name, tensor in tensors.items())
    assert join(TRELLIS, [last, first], K) is None
    assert join(TRELLIS, [first, {**last, "filter": -last["filter"]}], K) is None
