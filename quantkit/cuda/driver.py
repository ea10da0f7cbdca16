"""The one driver call that CuPy does not offer: launching with attributes, such as an early start or clusters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from quantkit.errors import KernelError

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_ATTRIBUTE_WORDS = 16  # CUlaunchAttributeValue is a union of 64 bytes

Value = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * _ATTRIBUTE_WORDS))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_mem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError("the NVIDIA driver library libcuda.so.1 cannot be loaded; install the driver") from error


def launch_with_attributes(
    function: int,
    stream: int,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    values: Sequence[Value],
    shared_mem: int,
    overlap: bool,
    cluster: int,
) -> None:
    """Queue a kernel on a GPU of compute capability 9.0 or later.

    overlap: programmatic dependent launch: it may start once every block of the kernel before it has ended or said so,
    and must itself wait (griddepcontrol.wait) before it touches anything that other kernels write or read.
    cluster: blocks along x that run together and see each other's shared memory.
    function, stream: CUfunction and CUstream handles. values: the arguments, in order.
    Raises KernelError with the driver's error number.
    """
    wanted: dict[int, tuple[int, ...]] = {_CLUSTER_DIMENSION: (cluster, 1, 1)} if cluster > 1 else {}
    wanted |= {_PROGRAMMATIC_STREAM_SERIALIZATION: (1,)} if overlap else {}
    attributes = (_Attribute * len(wanted))()
    for attribute, (number, words) in zip(attributes, wanted.items(), strict=True):
        attribute.id = number
        attribute.value[: len(words)] = words
    config = _Config(
        (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_mem, stream, attributes, len(wanted)
    )
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    code = _library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function), pointers, None)
    if code:
        raise KernelError(f"kernel launch failed with CUDA driver error {code}")
