"""AWQ checkpoints in the ``gemm`` layout, as AutoAWQ and GPTQModel write them.

Per Linear [N, K] with groups of g columns, G per row, 4 bits; eight rows share a word, interleaved (words.py):
    qweight [K, N / 8] int32   codes
    qzeros  [G, N / 8] int32   zero points
    scales  [G, N]             w = scale * (code - zero)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.exchange.gptq import FLOATS
from quantkit.exchange.grid import Grid, check_zero
from quantkit.exchange.source import Folder, Get, Layout, SourceLayer, check_groups, whole_number
from quantkit.exchange.words import AWQ_BITS, unpack_awq

_VERSION = "gemm"


def check(document: Mapping[str, Any]) -> None:
    """Raise CheckpointError for another layout than gemm."""
    stated = document.get("version", document.get("checkpoint_format", document.get("format", _VERSION)))
    if not isinstance(stated, str) or stated.lower() != _VERSION:
        raise CheckpointError(f"quantization_config: version is {stated!r}; of AWQ's layouts quantkit reads {_VERSION}")


def layers(folder: Folder) -> dict[str, SourceLayer]:
    """The Linears of an AWQ folder. Raises CheckpointError for tensors that are missing or do not fit together."""
    check(folder.document)
    bits = folder.document.get("bits", folder.document.get("w_bit"))
    if bits != AWQ_BITS:
        raise CheckpointError(f"quantization_config: bits is {bits!r}; AWQ's gemm layout has {AWQ_BITS}")
    group_size = whole_number(folder.document, "group_size" if "group_size" in folder.document else "q_group_size")
    return {name: _layer(folder, name, group_size) for name in folder.modules_with("qweight")}


def _layer(folder: Folder, name: str, group_size: int) -> SourceLayer:
    fields = {field: f"{name}.{field}" for field in ("qweight", "qzeros", "scales")}
    columns, words = folder.field(fields["qweight"], ("I32",), (None, None)).shape
    rows = words * 8
    groups = folder.field(fields["scales"], FLOATS, (None, rows)).shape[0]
    folder.field(fields["qzeros"], ("I32",), (groups, words))
    size = check_groups(name, group_size, groups, columns)
    return SourceLayer(name, (rows, columns), AWQ_BITS, size, fields, folder.bytes_of(fields))


def grid(layer: SourceLayer, get: Get) -> Grid:
    """The levels of a layer."""
    zero = unpack_awq(get(layer.fields["qzeros"])).t().contiguous()
    step = get(layer.fields["scales"]).double().t().contiguous()
    if not torch.isfinite(step).all():
        raise CheckpointError(f"{layer.name}.scales: holds NaN or Inf; copy it again")
    return Grid(layer.bits, layer.group_size, step, zero=check_zero(zero, layer.bits, layer.name))


def codes(layer: SourceLayer, get: Get) -> Tensor:
    """[N, K] uint8."""
    return unpack_awq(get(layer.fields["qweight"])).t().contiguous()


LAYOUT = Layout(grid, codes)
