"""safetensors files whose headers hold a digest of every tensor, and what checks them.

A header's metadata maps ``quantkit.xxh3.NAME`` to the digest of the tensor NAME: XXH3 of 128 bits over its dtype and
shape, written ``F16 [64, 128]`` with a line end, and its bytes as they lie in the file. ``quantkit.xxh3.__metadata__``
is the digest of the rest of the metadata. Files without digests are read all the same; they are unverified.

Digests tell damage, not malice: who can alter a tensor can alter its digest. So XXH3 serves, whose cost is
small beside that of a load (docs/reliability.md); sha256 takes many times as long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from quantkit.errors import QuantkitError, refusing

DIGEST_PREFIX = "quantkit.xxh3."
DIGEST_LETTERS = 32
_METADATA = "__metadata__"  # the one name that the format gives to no tensor
VERIFY_VARIABLE = "QUANTKIT_VERIFY"
# of torch.uint8 and so on, by the names of the safetensors format, with bytes per value
DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
FLOATS = frozenset(name for dtype, name in DTYPES.items() if dtype.is_floating_point)
_READ_BYTES = 1 << 20  # between two updates of a digest: it lies in the processor's cache when it is hashed
_RUN_BYTES = 1 << 25  # of one task: opening and starting cost little beside it
_MOST_THREADS = 16
_ALIGNMENT = 8
_COPYING = 8  # threads that put a file together


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its dtype by the format's name, its shape, and where its bytes start."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        count = _ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class TensorFile:
    """The header of one file: its metadata, and its tensors in the order of their bytes."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]

    @property
    def digests(self) -> dict[str, str]:
        """The digests that the header states, by tensor and of the metadata; empty for a file written without."""
        named = (item for item in self.metadata.items() if item[0].startswith(DIGEST_PREFIX))
        return {name.removeprefix(DIGEST_PREFIX): digest for name, digest in named}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a new safetensors file with the digest of every tensor beside the given metadata; raises OSError.

    The same tensors and metadata give the same bytes (the safetensors library writes metadata in random order).
    """
    ordered = in_file_order(tensors)
    with ThreadPoolExecutor(_threads()) as pool:
        digests = dict(zip(ordered, pool.map(tensor_digest, ordered.values()), strict=True))
    with path.open("xb") as file:
        file.write(file_header(ordered, metadata, digests))
        for tensor in ordered.values():
            file.write(raw_bytes(tensor))


def copy_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], sources: Mapping[str, TensorFile]
) -> None:
    """Write the file that write_tensors would write, the bytes and digests coming from other files; raises OSError.

    tensors: their shapes and dtypes, on the meta device. sources: by name, the file that holds the tensor.
    """
    ordered = in_file_order(tensors)
    header = file_header(ordered, metadata, {name: sources[name].digests[name] for name in ordered})
    starts = accumulate((tensor.numel() * tensor.itemsize for tensor in ordered.values()), initial=len(header))
    with path.open("xb") as file, ThreadPoolExecutor(_COPYING) as pool:
        write_at(file.fileno(), header, 0)
        copies = (
            pool.submit(_copy, sources[name], name, file.fileno(), start)
            for name, start in zip(ordered, starts, strict=False)
        )
        for copy in list(copies):
            copy.result()


def _copy(source: TensorFile, name: str, descriptor: int, start: int) -> None:
    room = memoryview(bytearray(_READ_BYTES))
    with source.path.open("rb", buffering=0) as stream:
        for part in _stored_bytes(stream, source.tensors[name], room):
            write_at(descriptor, part, start)
            start += len(part)


def write_at(descriptor: int, content: bytes | memoryview, start: int) -> None:
    """Write all of the bytes to a place in a file; raises OSError."""
    left = memoryview(content)
    while left:
        written = os.pwrite(descriptor, left, start)
        left, start = left[written:], start + written


def read_into(room: Tensor, file: TensorFile, name: str, first: int = 0) -> None:
    """Fill contiguous memory with the bytes of a tensor in a file from the byte ``first`` on.

    Raises OSError, also where the file ends before.
    """
    left = raw_bytes(room)
    with file.path.open("rb", buffering=0) as stream:
        stream.seek(file.tensors[name].start + first)
        while left:
            count = stream.readinto(left)
            if not count:
                raise OSError(f"it ends within {name}")
            left = left[count:]


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they lie in a file: those of wide values first, so that each is aligned."""
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))}


def file_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], digests: Mapping[str, str]) -> bytes:
    """What stands before the tensors in a file: the header's length and the header."""
    stated = {DIGEST_PREFIX + name: digest for name, digest in digests.items()}
    stated |= {**metadata, DIGEST_PREFIX + _METADATA: _metadata_digest(metadata)}
    entries: dict[str, object] = {_METADATA: dict(sorted(stated.items()))}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.itemsize
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def tensor_digest(tensor: Tensor) -> str:
    """The digest of a tensor in memory."""
    digest = _started(DTYPES[tensor.dtype], tuple(tensor.shape))
    digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def read_header(path: Path, what: str, kind: type[QuantkitError], hint: str = "") -> TensorFile:
    """The header of a safetensors file.

    Raises ``kind``, in one line that starts with ``what``, for one that is missing, damaged or no regular file.
    """
    with refusing(f"{what} cannot be read", kind, hint):
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
        with safe_open(path, framework="pt") as handle:
            parts = {name: handle.get_slice(name) for name in handle.offset_keys()}
            stated = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
            metadata = handle.metadata() or {}
        tensors = {}
        for name, (dtype, shape) in stated.items():
            if dtype not in _ITEM_BYTES:
                raise ValueError(f"{name} is stored as {dtype}, which nothing here reads")
            tensors[name] = StoredTensor(dtype, shape, start)
            start += tensors[name].bytes
        return TensorFile(path, metadata, tensors)


def verifies() -> bool:
    """Whether loading compares digests: unless QUANTKIT_VERIFY is 0."""
    return os.environ.get(VERIFY_VARIABLE) != "0"


class Verification:
    """The comparison of every tensor of some files with its digest, in threads that begin at once.

    Reading and hashing let go of the interpreter: what is loaded meanwhile hides much of the time.
    """

    def __init__(self, files: Iterable[TensorFile], kind: type[QuantkitError]):
        """Begin. Raises ``kind`` where some tensors, or some files, have digests and others have none."""
        self._kind = kind
        files = tuple(files)
        expected = [(file, dict(_expected(file, kind))) for file in files]
        self._count = sum(len(digests) for _, digests in expected)
        bare = next((file for file in files if file.tensors and not file.digests), None)
        if self._count and bare is not None:
            raise kind(f"{bare.path}: holds no digests, but the files beside it do; copy the folder again")
        runs = [(file, run) for file, digests in expected for run in _runs(file, digests)]
        pool = ThreadPoolExecutor(_threads())
        self._running = [(file, pool.submit(_altered, file, run)) for file, run in runs]
        pool.shutdown(wait=False)

    def finish(self) -> int:
        """How many tensors were compared; 0 where the files hold no digests.

        Raises ``kind`` naming the first tensor, in alphabetical order, that is not what was written.
        """
        altered: list[tuple[str, Path]] = []
        for file, result in self._running:
            with refusing(f"{file.path} cannot be read", self._kind):
                altered += ((name, file.path) for name in result.result())
        if altered:
            name, path = min(altered)
            raise self._kind(f"{path}: tensor {name} is not what was written: its digest differs; copy the file again")
        return self._count


def _expected(file: TensorFile, kind: type[QuantkitError]) -> Iterator[tuple[str, str]]:
    digests = file.digests
    if not digests:
        return
    rest = {name: value for name, value in file.metadata.items() if not name.startswith(DIGEST_PREFIX)}
    if digests.pop(_METADATA, None) != _metadata_digest(rest):
        raise kind(f"{file.path}: the metadata in its header is not what was written; copy the file again")
    if digests.keys() != file.tensors.keys():
        odd = min(digests.keys() ^ file.tensors.keys())
        problem = "has no digest" if odd in file.tensors else "has a digest but is missing"
        raise kind(f"{file.path}: tensor {odd} {problem}; the header was altered, copy the file again")
    yield from digests.items()


def _runs(file: TensorFile, digests: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The digests of neighbours in the file, as many as make up the work of one thread."""
    run: dict[str, str] = {}
    size = 0
    for name in file.tensors:
        if name in digests:
            run[name] = digests[name]
            size += file.tensors[name].bytes
        if size >= _RUN_BYTES:
            yield run
            run, size = {}, 0
    if run:
        yield run


def _altered(file: TensorFile, digests: Mapping[str, str]) -> list[str]:
    """The tensors that are not what their digests say."""
    altered, room = [], memoryview(bytearray(_READ_BYTES))
    with file.path.open("rb", buffering=0) as stream:
        for name, expected in digests.items():
            stored = file.tensors[name]
            digest, count = _started(stored.dtype, stored.shape), 0
            for part in _stored_bytes(stream, stored, room):
                digest.update(part)
                count += len(part)
            if count != stored.bytes or digest.hexdigest() != expected:
                altered.append(name)
    return altered


def _stored_bytes(stream: FileIO, stored: StoredTensor, room: memoryview) -> Iterator[memoryview]:
    """The bytes of a tensor as they lie in its file, part by part; fewer where the file ends. room: for a part."""
    stream.seek(stored.start)
    left = stored.bytes
    while left:
        count = stream.readinto(room[:left])
        if not count:
            return
        yield room[:count]
        left -= count


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    return xxhash.xxh3_128(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _started(dtype: str, shape: tuple[int, ...]) -> xxhash.xxh3_128:
    return xxhash.xxh3_128(f"{dtype} {list(shape)}\n".encode())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they are stored; on the CPU without a copy."""
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)
