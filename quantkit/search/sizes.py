"""What every choice costs in the written files, to the byte: budgets are promises.

A safetensors file is 8 bytes of header length, a JSON header padded to 8 bytes with one entry and one digest per
tensor, and the tensors. Shapes, dtypes and names are known before anything is quantized; only the offsets in the header
are not, so each is counted with as many digits as the whole budget has.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from math import prod

import torch
from torch import nn

from quantkit.checkpoint.read import CONFIG_DIGEST
from quantkit.checkpoint.write import MAX_SHARD_BYTES, stored_tensors
from quantkit.errors import RecipeError
from quantkit.formats.base import Shape
from quantkit.formats.table import FORMATS, format_name
from quantkit.storage.tensors import DIGEST_LETTERS, DIGEST_PREFIX, DTYPES, file_header

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MOST_DIGITS = 20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DIGEST = "0" * DIGEST_LETTERS
_SHA256 = "0" * 64
# Where a file holds no tensor: the entries add their own length. Padding adds up to 7 bytes.
_FILE_OVERHEAD = len(file_header({}, {"format": "pt", CONFIG_DIGEST: _SHA256}, {})) + 7


def parse_bytes(text: str) -> int:
    """Bytes of ``90MB``, ``1.5GiB`` or ``1000000``; MB is 10**6, MiB 2**20.

    Raises RecipeError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS or len(match[1]) > _MOST_DIGITS:
        raise RecipeError(f"budget {text}: expected a size such as 90MB, 1.5GiB or 90000000")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def quantized_bytes(name: str, spec: object, shape: Shape, digits: int) -> int:
    """Most bytes that one quantized [N, K] weight takes in a file: its tensors and their header entries.

    digits: of the largest offset that the file can hold.
    """
    tensors = FORMATS[format_name(spec)].tensors(spec, shape)
    return sum(
        prod(tensor.shape) * tensor.dtype.itemsize + _entry(f"{name}.{field}", tensor.dtype, tensor.shape, digits)
        for field, tensor in tensors.items()
    )


def fixed_bytes(model: nn.Module, quantized: Collection[str], dtype: torch.dtype, digits: int) -> int:
    """Most bytes of everything else: unquantized weights, biases, file headers.

    quantized: names, in the files, of the Linears whose weights are replaced. dtype: what floating-point tensors are
    written in.
    """
    replaced, size = {f"{name}.weight" for name in quantized}, _FILE_OVERHEAD
    for name, tensor in stored_tensors(model).items():
        if name not in replaced:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            size += tensor.numel() * kind.itemsize + _entry(name, kind, tuple(tensor.shape), digits)
    return size


def offset_digits(model: nn.Module, limit: float) -> int:
    """Digits of the largest offset in a file of the model, given a limit on its bytes (inf where there is none)."""
    widest = 8 * sum(tensor.numel() for tensor in model.state_dict().values())  # no format takes 8 bytes a weight
    return len(str(int(min(limit, widest))))


def shard_overhead(total: int) -> int:
    """Most bytes that further files add where ``total`` bytes are split: two neighbours together exceed one shard."""
    return 2 * (total // MAX_SHARD_BYTES) * _FILE_OVERHEAD


def _entry(name: str, dtype: torch.dtype, shape: tuple[int, ...], digits: int) -> int:
    """Length of ``"name":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},`` and of the digest's entry."""
    sizes = ",".join(map(str, shape))
    fields = f'"{name}":{{"dtype":"{DTYPES[dtype]}","shape":[{sizes}],"data_offsets":[,]}},'
    return len((fields + f'"{DIGEST_PREFIX}{name}":"{_DIGEST}",').encode()) + 2 * digits
