"""What one rank of tensor parallelism keeps of a stored Linear: some rows of N and one range of columns of K.

Every shard is exact: what it stands for is, bit for bit, that part of the whole weight. Along N all formats are alike:
the stored tensors that grow with N have it at dimension -2. Along K:

    bcq, bipolar   a shard starts at a whole byte of the planes. Where it cuts a group, all groups are split into equal
                   finer ones, whose scales repeat that of the group they come from.
    flatten        a shard keeps the columns that carry its input channels, padded again to whole tiles.
    trellis        a shard starts at a whole byte of the planes; there are no groups. Along N it is whole rings of rows.

Activation ranges: ``act_clip`` per token is a fraction of the largest |x| of the columns at hand, so a shard along K
quantizes its activations in finer steps than the whole layer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.errors import CheckpointError
from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import ROW_WISE, BcqSpec, group_width
from quantkit.formats.bipolar import BipolarSpec
from quantkit.formats.flatten import FlattenSpec, pack_nibbles, padded_columns, unpack_codes
from quantkit.formats.hadamard import WIDEST_BLOCK, block_width
from quantkit.formats.planes import BITS_PER_BYTE, packed_width
from quantkit.formats.table import FORMATS, format_name
from quantkit.formats.trellis import BLOCK_ROWS, ROW_STEP, TrellisSpec

Span = tuple[int, int]  # start and end, which is not in it
_PLANES = ("signs", "bit_planes")
_BY_GROUP = ("scales", "offset")
_PACKED_BITS = 4


def shard(
    spec: Any, tensors: Tensors, shape: Shape, *, out_spans: Sequence[Span], in_span: Span
) -> tuple[Any, dict[str, Tensor]]:
    """The spec and the tensors of a part of a weight; some may be views of the whole's.

    shape: (N, K) of the whole. out_spans: of N, in the order in which they are kept. in_span: of K.
    Raises CheckpointError where N or K cannot be cut there.
    """
    check_out_spans(spec, shape[0], out_spans)
    along_n = _along_n(spec, shape[-1])
    kept = {name: _take_rows(tensors[name], out_spans) if grows else tensors[name] for name, grows in along_n}
    if in_span == (0, shape[-1]):
        return spec, kept
    if isinstance(spec, FlattenSpec):
        _check_rotated(spec, shape[-1], in_span)
        return _take_channels(spec, kept, in_span)
    return _take_columns(spec, kept, shape[-1], in_span)


def shard_spec(spec: Any, in_features: int, in_span: Span) -> Any:
    """The spec of a shard, without the tensors; of flatten, whose map says how many columns, an even share.

    Raises CheckpointError as ``shard`` does.
    """
    if in_span == (0, in_features):
        return spec
    if isinstance(spec, FlattenSpec):
        _check_rotated(spec, in_features, in_span)
        share = -(-spec.extended_channels * (in_span[1] - in_span[0]) // in_features)
        return replace(spec, extended_channels=padded_columns(share))
    _check_columns(spec, in_features, in_span)
    if isinstance(spec, TrellisSpec):
        return spec
    return replace(spec, group_size=_cut_groups(spec, in_features, in_span).group_size)


def check_out_spans(spec: Any, out_features: int, out_spans: Sequence[Span]) -> None:
    """Raise CheckpointError where rows of the trellis format cut a block, or one would not start at a multiple of 64
    of what is kept."""
    if not isinstance(spec, TrellisSpec):
        return
    for number, (start, end) in enumerate(out_spans, 1):
        if start % BLOCK_ROWS or (end % BLOCK_ROWS and (end != out_features or number != len(out_spans))):
            raise CheckpointError(
                f"a shard of the rows {start} to {end} of {out_features} cuts a block of {BLOCK_ROWS} rows, which "
                "method trellis codes together; serve it on a number of GPUs that divides N into multiples of "
                f"{BLOCK_ROWS}"
            )


def join(spec: Any, parts: Sequence[Tensors], in_features: int) -> dict[str, Tensor] | None:
    """The tensors of weights of one spec, one above the other along N; None where they differ in what they share, or
    a weight in the trellis format would start within a block of rows."""
    if isinstance(spec, TrellisSpec) and any(part["signs"].shape[-2] % BLOCK_ROWS for part in parts[:-1]):
        return None
    along = _along_n(spec, in_features)
    for name, grows in along:
        if not grows and not all(torch.equal(part[name], parts[0][name]) for part in parts):
            return None
    return {name: torch.cat([part[name] for part in parts], -2) if grows else parts[0][name] for name, grows in along}


def _along_n(spec: Any, in_features: int) -> list[tuple[str, bool]]:
    """Every stored tensor, and whether it grows with N."""
    row = FORMATS[format_name(spec)]
    fewer, more = (row.tensors(spec, (rows, in_features)) for rows in (ROW_STEP, 2 * ROW_STEP))  # N of any format
    return [(name, tensor != more[name]) for name, tensor in fewer.items()]


def _take_rows(tensor: Tensor, rows: Sequence[Span]) -> Tensor:
    parts = [tensor.narrow(-2, start, end - start) for start, end in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


@dataclass(frozen=True)
class _CutGroups:
    """group_size: of the shard. repeat: how often each group's scales stand there. first, last: of those repeated."""

    group_size: int
    repeat: int
    first: int
    last: int


def _cut_groups(spec: BcqSpec | BipolarSpec, in_features: int, in_span: Span) -> _CutGroups:
    start, end = in_span
    group = group_width(spec.group_size, in_features)
    if group == in_features:
        return _CutGroups(ROW_WISE, 1, 0, 1)
    # The last group of a row ends with it, however short that leaves it.
    fine = gcd(group, start) if end == in_features else gcd(group, start, end)
    return _CutGroups(fine, group // fine, start // fine, -(-end // fine))


def _check_columns(spec: BcqSpec | BipolarSpec | TrellisSpec, in_features: int, in_span: Span) -> None:
    """Raise CheckpointError where a shard of the planes starts or ends within a byte, or cuts a rotated block."""
    start, end = in_span
    if start % BITS_PER_BYTE or (end % BITS_PER_BYTE and end != in_features):
        raise CheckpointError(
            f"a shard of the columns {start} to {end} of {in_features} starts or ends within a byte of the bit planes; "
            "serve it on a number of GPUs that divides K into multiples of 8"
        )
    _check_rotated(spec, in_features, in_span)


def _check_rotated(spec: BcqSpec | BipolarSpec | TrellisSpec | FlattenSpec, in_features: int, in_span: Span) -> None:
    """Raise CheckpointError where a shard of rotated columns starts within a block, or has blocks of another width."""
    start, end = in_span
    if spec.rotate_inputs and (start % WIDEST_BLOCK or block_width(end - start) != block_width(in_features)):
        raise CheckpointError(
            f"a shard of the columns {start} to {end} of {in_features} cuts a block of {WIDEST_BLOCK} columns, over "
            "which the input is rotated; serve it on fewer GPUs"
        )


def _take_columns(
    spec: BcqSpec | BipolarSpec | TrellisSpec, tensors: Tensors, in_features: int, in_span: Span
) -> tuple[Any, dict[str, Tensor]]:
    _check_columns(spec, in_features, in_span)
    kept = dict(tensors)
    for name in kept.keys() & set(_PLANES):
        kept[name] = kept[name][..., in_span[0] // BITS_PER_BYTE : packed_width(in_span[1])]
    if isinstance(spec, TrellisSpec):
        return spec, kept
    groups = _cut_groups(spec, in_features, in_span)
    for name in kept.keys() & set(_BY_GROUP):
        kept[name] = kept[name].repeat_interleave(groups.repeat, -1)[..., groups.first : groups.last]
    return replace(spec, group_size=groups.group_size), kept


def _take_channels(spec: FlattenSpec, tensors: Tensors, in_span: Span) -> tuple[FlattenSpec, dict[str, Tensor]]:
    """Columns keep their order, so a shard's columns also begin with its channels in order."""
    start, end = in_span
    source = tensors["source_channel"]
    own = ((source >= start) & (source < end)).nonzero().flatten()
    width = padded_columns(len(own))
    padding = (0, width - len(own))
    codes = pad(unpack_codes(tensors["codes"])[:, own], padding)
    kept = {
        **tensors,
        "codes": pack_nibbles(codes) if spec.weight_bits == _PACKED_BITS else codes,
        "source_channel": pad(source[own] - start, padding),
        "source_segment": pad(tensors["source_segment"][own], padding),
    }
    if spec.smooth:
        kept["smooth_scale"] = tensors["smooth_scale"][start:end]
    return replace(spec, extended_channels=width), kept
