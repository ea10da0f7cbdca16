"""How Hopper's copies by boxes see a matrix: the driver's description of it, a parameter of the kernel that copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from quantkit.cuda.library import cuda_library
from quantkit.errors import KernelError

MAP_BYTES = 128
_ALIGNMENT = 64  # of what the driver writes
_KEPT = 1 << 14  # maps: addresses come back, as memory is taken from the same pieces again
_RANK, _SHORT_BYTES = 2, 2
# CUtensorMapDataType, -Interleave, -Swizzle, -L2promotion and -FloatOOBfill of cuda.h
_SHORTS, _NO_INTERLEAVE, _SWIZZLE_128_BYTES, _PROMOTE_128_BYTES, _ZEROS = 1, 0, 3, 2, 0


class TensorMap(NamedTuple):
    """A matrix [rows, columns] of 16-bit elements, copied by boxes of so many rows and columns.

    matrix: contiguous, 16-byte aligned, its columns a multiple of 8; a box is 128 bytes wide, in shared memory under
    the 128-byte swizzle, and zeros behind the last row and column.
    """

    matrix: Tensor
    box_rows: int
    box_columns: int

    @property
    def device(self) -> torch.device:
        """Of the matrix."""
        return self.matrix.device

    def encoded(self) -> bytes:
        """What the kernel takes. Raises KernelError with the driver's error number, or where the driver has no maps."""
        rows, columns = self.matrix.shape
        return encoded_map(self.matrix.data_ptr(), rows, columns, self.box_rows, self.box_columns)


@lru_cache(_KEPT)
def encoded_map(address: int, rows: int, columns: int, box_rows: int, box_columns: int) -> bytes:
    """What TensorMap.encoded gives for a matrix at an address."""
    memory = (ctypes.c_char * (MAP_BYTES + _ALIGNMENT))()
    start = -ctypes.addressof(memory) % _ALIGNMENT
    code = _encoder()(
        ctypes.addressof(memory) + start,
        _SHORTS,
        _RANK,
        address,
        (ctypes.c_uint64 * _RANK)(columns, rows),
        (ctypes.c_uint64 * (_RANK - 1))(columns * _SHORT_BYTES),
        (ctypes.c_uint32 * _RANK)(box_columns, box_rows),
        (ctypes.c_uint32 * _RANK)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128_BYTES,
        _PROMOTE_128_BYTES,
        _ZEROS,
    )
    if code:
        raise KernelError(f"tensor map of a matrix [{rows}, {columns}] failed with CUDA driver error {code}")
    return memory.raw[start : start + MAP_BYTES]


@cache
def _encoder() -> Callable[..., int]:
    try:
        encode = cuda_library().cuTensorMapEncodeTiled
    except AttributeError as error:
        raise KernelError("this NVIDIA driver has no tensor maps; update it to one for CUDA 12 or newer") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    encode.argtypes = (pointer, number, ctypes.c_uint32, *[pointer] * 5, *[number] * 4)
    return encode
