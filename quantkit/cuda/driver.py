"""The driver call that queues a kernel, with its arguments and with attributes: an early start, clusters."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from quantkit.cuda.library import cuda_library
from quantkit.cuda.parameters import Argument, Parameter
from quantkit.cuda.tensor_map import MAP_BYTES
from quantkit.errors import KernelError

_CLUSTER_DIMENSION, _PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6  # CUlaunchAttributeID
_ATTRIBUTE_WORDS = 16  # CUlaunchAttributeValue is a union of 64 bytes
_WORD_BYTES = 8


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * _ATTRIBUTE_WORDS))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_mem", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


@cache
def _library() -> ctypes.CDLL:
    library = cuda_library()
    library.cuLaunchKernelEx.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return library


@cache
def _attributes(overlap: bool, cluster: int) -> ctypes.Array[_Attribute]:
    wanted: dict[int, tuple[int, ...]] = {_CLUSTER_DIMENSION: (cluster, 1, 1)} if cluster > 1 else {}
    wanted |= {_PROGRAMMATIC_STREAM_SERIALIZATION: (1,)} if overlap else {}
    attributes = (_Attribute * len(wanted))()
    for attribute, (number, words) in zip(attributes, wanted.items(), strict=True):
        attribute.id = number
        attribute.value[: len(words)] = words
    return attributes


def _places(codes: tuple[str, ...]) -> list[int]:
    """Where the values of such types stand, one behind the other, in bytes."""
    ends = (struct.calcsize(f"@{''.join(codes[: i + 1])}") for i in range(len(codes)))
    return [end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True)]


@dataclass(frozen=True)
class LaunchShape:
    """How a launch is laid out.

    grid: blocks. block: threads. shared_mem: bytes of dynamic shared memory. overlap: programmatic dependent launch:
    the kernel may start once every block of the kernel before it has ended or said so, and must itself wait
    (griddepcontrol.wait) before it touches anything that other kernels write or read. cluster: blocks along x that run
    together and see each other's shared memory.
    """

    grid: tuple[int, ...]
    block: int
    shared_mem: int
    overlap: bool
    cluster: int


class _Call:
    """What the driver reads of one launch: values of the parameters, pointers to them, configuration."""

    def __init__(self, codes: tuple[str, ...]):
        packed = struct.Struct(f"@{''.join(codes)}")
        self.values = (ctypes.c_uint64 * -(-packed.size // _WORD_BYTES))()
        self.pack_into = packed.pack_into
        self.start = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * len(codes))(*(self.start + place for place in _places(codes)))
        self.pointers = ctypes.addressof(self._pointers)
        self.config = _Config(block_y=1, block_z=1)
        self.configured = ctypes.addressof(self.config)


class LoadedKernel:
    """A kernel in a GPU's memory, ready to be queued.

    function: CuPy's, whose ``ptr`` is the CUfunction and which keeps the module loaded. parameters: in the kernel's
    order. checked: whether a launch's arguments were compared with them. Threads may share it: each has a _Call of its
    own.
    """

    def __init__(self, function: Any, parameters: tuple[Parameter, ...]):
        self.function, self.parameters, self.checked = function, parameters, False
        self._handle: int = function.ptr
        self._names = tuple(parameter.name for parameter in parameters)
        self._pointers = tuple(i for i, parameter in enumerate(parameters) if parameter.pointer)
        self._maps = tuple(i for i, parameter in enumerate(parameters) if parameter.map)
        self._codes = tuple(parameter.code for parameter in parameters)
        self._own = threading.local()

    def queue(self, arguments: Mapping[str, Argument], shape: LaunchShape, stream: int) -> None:
        """Queue one launch; the arguments are those of ``parameters``, see check_arguments. stream: CUstream.

        Raises KernelError for arguments of other names or kinds, and with the driver's error number.
        """
        call = self._filled(arguments, shape)
        call.config.stream = stream
        self._launch(call)

    def fixed(self, arguments: Mapping[str, Argument], shape: LaunchShape, open_names: Sequence[str]) -> FixedLaunch:
        """The launch as one that differs in the pointers and maps of these names alone, in their order."""
        call = self._filled(arguments, shape)
        places = dict(zip(self._names, _places(self._codes), strict=True))
        maps = {self._names[i] for i in self._maps}
        return FixedLaunch(
            self,
            ctypes.string_at(call.start, ctypes.sizeof(call.values)),
            ctypes.string_at(call.configured, ctypes.sizeof(call.config)),
            tuple(places[name] // _WORD_BYTES for name in open_names if name not in maps),
            next((places[name] for name in open_names if name in maps), None),
        )

    def queue_fixed(self, it: FixedLaunch, words: Sequence[int], encoded: bytes, stream: int) -> None:
        """Queue a launch that ``fixed`` made. words: the open pointers. encoded: the open map, see TensorMap.

        stream: CUstream. Raises KernelError with the driver's error number.
        """
        call = self._call()
        ctypes.memmove(call.start, it.values, len(it.values))
        for place, word in zip(it.words, words, strict=True):
            call.values[place] = word
        if it.map is not None:
            ctypes.memmove(call.start + it.map, encoded, MAP_BYTES)
        ctypes.memmove(call.configured, it.config, len(it.config))
        call.config.stream = stream
        self._launch(call)

    def _call(self) -> _Call:
        try:
            call: _Call = self._own.call
        except AttributeError:
            call = self._own.call = _Call(self._codes)
        return call

    def _filled(self, arguments: Mapping[str, Argument], shape: LaunchShape) -> _Call:
        call = self._call()
        try:
            values: list[Any] = [arguments[name] for name in self._names]
            for i in self._pointers:
                values[i] = 0 if values[i] is None else values[i].data_ptr()
            for i in self._maps:
                values[i] = b"" if values[i] is None else values[i].encoded()
            call.pack_into(call.values, 0, *values)
        except (AttributeError, KeyError, struct.error) as error:
            raise KernelError(f"kernel launch with a missing argument or one of the wrong kind: {error}") from error
        config, attributes = call.config, _attributes(shape.overlap, shape.cluster)
        config.grid_x, config.grid_y, config.grid_z = (*shape.grid, 1, 1)[:3]
        config.block_x, config.shared_mem = shape.block, shape.shared_mem
        config.attributes, config.attribute_count = attributes, len(attributes)
        return call

    def _launch(self, call: _Call) -> None:
        code = _library().cuLaunchKernelEx(call.configured, self._handle, call.pointers, None)
        if code:
            raise KernelError(f"kernel launch failed with CUDA driver error {code}")


@dataclass(frozen=True, eq=False)
class FixedLaunch:
    """A launch as the driver reads it, all but some pointers and a map, see LoadedKernel.queue_fixed.

    values, config: bytes of the parameters and of CUlaunchConfig. words, map: where the open ones stand among the
    values, in words of 8 bytes and in bytes.
    """

    kernel: LoadedKernel
    values: bytes
    config: bytes
    words: tuple[int, ...]
    map: int | None
