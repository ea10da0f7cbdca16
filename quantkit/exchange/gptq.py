"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

Per Linear [N, K] with groups of g columns, G per row (all streams are those of words.py):
    qweight [K * bits / 32, N] int32   codes, a stream down each column
    qzeros  [G, N * bits / 32] int32   zero points, a stream along each row
    scales  [G, N]                     w = scale * (code - zero)
    g_idx   [K] int32                  the group of each column
The format ``gptq`` (v1) stores zero points less 1, ``gptq_v2`` as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.exchange.grid import Grid, check_zero
from quantkit.exchange.source import Folder, Get, Layout, SourceLayer, check_groups, other_groups, whole_number
from quantkit.exchange.words import WORD_BITS, pack_stream, stream_words, unpack_stream
from quantkit.formats.bcq import group_width

BITS = (2, 3, 4, 8)
V1, V2 = "gptq", "gptq_v2"
_FORMATS = (V1, V2)
FLOATS = ("F16", "BF16", "F32")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # 1 in every code of a word


def version(document: Mapping[str, Any]) -> str:
    """``gptq`` or ``gptq_v2``. Raises CheckpointError for another format."""
    stated = document.get("checkpoint_format", document.get("format", V1))
    if stated not in _FORMATS:
        raise CheckpointError(f"quantization_config: checkpoint_format is {stated!r}; known: {', '.join(_FORMATS)}")
    words = document.get("pack_dtype", "int32")
    if words != "int32":
        raise CheckpointError(f"quantization_config: pack_dtype is {words!r}; quantkit reads int32")
    return str(stated)


def layers(folder: Folder) -> dict[str, SourceLayer]:
    """The Linears of a GPTQ folder. Raises CheckpointError for tensors that are missing or do not fit together."""
    version(folder.document)
    return {name: _layer(folder, name, _settings(folder.document, name)) for name in folder.modules_with("qweight")}


def _settings(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What the configuration says of a layer: ``dynamic`` holds patterns of names and what they change."""
    dynamic = document.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"quantization_config: dynamic is {dynamic!r}, no mapping of patterns")
    for pattern, own in dynamic.items():
        try:
            found = re.match(pattern.removeprefix("+:"), name)
        except re.error as error:
            raise CheckpointError(f"quantization_config: the pattern {pattern!r} is wrong ({error})") from error
        if not isinstance(own, Mapping):
            raise CheckpointError(f"quantization_config: dynamic says {own!r} of {pattern!r}, which is no mapping")
        if found:
            return {**document, **own}
    return document


def _layer(folder: Folder, name: str, settings: Mapping[str, Any]) -> SourceLayer:
    bits, group_size = whole_number(settings, "bits", BITS), whole_number(settings, "group_size")
    fields = {field: f"{name}.{field}" for field in ("qweight", "qzeros", "scales")}
    words, rows = folder.field(fields["qweight"], ("I32",), (None, None)).shape
    groups = folder.field(fields["scales"], FLOATS, (None, rows)).shape[0]
    columns = words * WORD_BITS // bits
    if f"{name}.g_idx" in folder.tensors:
        fields["g_idx"] = f"{name}.g_idx"
        columns = folder.field(fields["g_idx"], ("I32", "I64"), (None,)).shape[0]
    if stream_words(columns, bits) != words:
        raise CheckpointError(f"{name}.qweight: {words} words a column hold no {columns} codes of {bits} bits")
    folder.field(fields["qzeros"], ("I32",), (groups, stream_words(rows, bits)))
    size = check_groups(name, group_size, groups, columns, ragged="g_idx" in fields)
    return SourceLayer(name, (rows, columns), bits, size, fields, folder.bytes_of(fields))


def grid(layer: SourceLayer, get: Get, *, stated: str) -> Grid:
    """The levels of a layer, groups in the order of its columns. stated: v1 or v2."""
    words = get(layer.fields["qzeros"])
    if stated == V1 and layer.bits in _ONES:
        words = words + _ONES[layer.bits]  # of whole words, as GPTQModel adds: what it took off comes back as it was
    zero = unpack_stream(words, layer.bits, layer.shape[0]).int()
    if stated == V1 and layer.bits not in _ONES:
        zero = (zero + 1) % 2**layer.bits
    order = _group_order(layer, get)
    step = get(layer.fields["scales"]).double()[order].t().contiguous()
    if not torch.isfinite(step).all():
        raise CheckpointError(f"{layer.name}.scales: holds NaN or Inf; copy it again")
    return Grid(
        layer.bits, layer.group_size, step, zero=check_zero(zero[order].t().contiguous(), layer.bits, layer.name)
    )


def codes(layer: SourceLayer, get: Get) -> Tensor:
    """[N, K] uint8."""
    return unpack_stream(get(layer.fields["qweight"]).t(), layer.bits, layer.shape[1])


def layout(folder: Folder) -> Layout:
    """How the layers of this folder are read."""
    stated = version(folder.document)
    return Layout(lambda layer, get: grid(layer, get, stated=stated), codes)


def _group_order(layer: SourceLayer, get: Get) -> Tensor:
    """The stored group of each run of ``group_size`` columns: the groups may stand in any order.

    Raises CheckpointError where the columns of a group are apart.
    """
    columns = layer.shape[1]
    width = group_width(layer.group_size, columns)
    count = -(-columns // width)
    if "g_idx" not in layer.fields:
        return torch.arange(count)
    index = get(layer.fields["g_idx"]).long()
    order = index[::width]
    if bool(((index < 0) | (index >= count)).any()):
        raise CheckpointError(f"{layer.name}.g_idx: names a group outside 0 to {count - 1}")
    stored = int((index == index[0]).sum())
    if stored != width and torch.equal(index, torch.arange(columns) // stored):
        raise CheckpointError(other_groups(layer.name, f"has groups of {stored} columns", layer.group_size, columns))
    if not torch.equal(index, order.repeat_interleave(width)[:columns]):
        raise CheckpointError(
            f"{layer.name}.g_idx: the columns of a group are apart (desc_act), and quantkit's kernels read groups of "
            "neighbouring columns; quantize with desc_act: false or static groups"
        )
    return order


def written(weight_codes: Tensor, levels: Grid, *, stated: str) -> dict[str, Tensor]:
    """The fields of a Linear with codes [N, K] on a grid with integer zeros; scales as fp16."""
    columns = weight_codes.shape[1]
    assert levels.zero is not None
    zero = levels.zero.t()
    if stated == V1 and levels.bits not in _ONES:
        zero = (zero - 1) % 2**levels.bits
    qzeros = pack_stream(zero, levels.bits)
    if stated == V1 and levels.bits in _ONES:
        qzeros = qzeros - _ONES[levels.bits]
    width = group_width(levels.group_size, columns)
    return {
        "qweight": pack_stream(weight_codes, levels.bits).t().contiguous(),
        "qzeros": qzeros,
        "scales": levels.step.t().half().contiguous(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // width,
    }


def check_writable(name: str, rows: int, columns: int, bits: int) -> None:
    """Raise CheckpointError where GPTQ's words cannot hold a Linear."""
    if bits not in BITS:
        raise CheckpointError(f"{name}: has {bits} bits; GPTQ stores {', '.join(map(str, BITS))}")
    if columns * bits % WORD_BITS or rows * bits % WORD_BITS or columns % WORD_BITS or rows % WORD_BITS:
        raise CheckpointError(f"{name}: {rows} x {columns} is not whole words; GPTQ wants multiples of {WORD_BITS}")
