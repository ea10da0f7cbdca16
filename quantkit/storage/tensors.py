"""safetensors files whose headers hold a sha256 of every tensor, and what checks them.

A header's metadata maps ``quantkit.sha256.NAME`` to the digest of the tensor NAME: sha256 over its dtype and shape,
written ``F16 [64, 128]`` with a line end, and its bytes as they lie in the file. ``quantkit.sha256.__metadata__`` is
the digest of the rest of the metadata. Files without digests are read all the same; they are unverified.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.errors import QuantkitError, refusing

DIGEST_PREFIX = "quantkit.sha256."
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
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
FLOATS = frozenset(name for dtype, name in DTYPES.items() if dtype.is_floating_point)
_READ_BYTES = 1 << 20  # between two updates of a digest: it lies in the processor's cache when it is hashed
_MOST_THREADS = 16
_ALIGNMENT = 8


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
        """The sha256 that the header states, by tensor and of the metadata; empty for a file written without."""
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
            file.write(_raw(tensor))


def copy_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], sources: Mapping[str, TensorFile]
) -> None:
    """Write the file that write_tensors would write, the bytes and digests coming from other files; raises OSError.

    tensors: their shapes and dtypes, on the meta device. sources: by name, the file that holds the tensor.
    """
    ordered = in_file_order(tensors)
    digests = {name: sources[name].digests[name] for name in ordered}
    with path.open("xb") as file:
        file.write(file_header(ordered, metadata, digests))
        for name in ordered:
            for part in _stored_bytes(sources[name], name):
                file.write(part)


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
    digest.update(_raw(tensor))
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

    hashlib lets go of the interpreter while it hashes: what is loaded meanwhile hides much of the time.
    """

    def __init__(self, files: Iterable[TensorFile], kind: type[QuantkitError]):
        """Begin; the largest tensors first.

        Raises ``kind`` where some tensors, or some files, have digests and others have none.
        """
        self._kind = kind
        files = tuple(files)
        work = [(file, name, digest) for file in files for name, digest in _expected(file, kind)]
        bare = next((file for file in files if file.tensors and not file.digests), None)
        if work and bare is not None:
            raise kind(f"{bare.path}: holds no digests, but the files beside it do; copy the folder again")
        work.sort(key=lambda item: -item[0].tensors[item[1]].bytes)
        pool = ThreadPoolExecutor(_threads())
        self._running = [(file, name, pool.submit(_matches, file, name, digest)) for file, name, digest in work]
        pool.shutdown(wait=False)

    def finish(self) -> int:
        """How many tensors were compared; 0 where the files hold no digests.

        Raises ``kind`` naming the first tensor, in alphabetical order, that is not what was written.
        """
        for file, name, result in sorted(self._running, key=lambda item: (item[1], item[0].path)):
            what = f"{file.path}: tensor {name}"
            with refusing(f"{what} cannot be read", self._kind):
                same = result.result()
            if not same:
                raise self._kind(f"{what} is not what was written: its sha256 differs; copy the file again")
        return len(self._running)


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


def _matches(file: TensorFile, name: str, expected: str) -> bool:
    stored = file.tensors[name]
    digest, count = _started(stored.dtype, stored.shape), 0
    for part in _stored_bytes(file, name):
        digest.update(part)
        count += len(part)
    return count == stored.bytes and digest.hexdigest() == expected


def _stored_bytes(file: TensorFile, name: str) -> Iterator[memoryview]:
    """The bytes of a tensor as they lie in its file, part by part; fewer where the file ends."""
    stored, room = file.tensors[name], memoryview(bytearray(_READ_BYTES))
    left = stored.bytes
    with file.path.open("rb", buffering=0) as stream:
        stream.seek(stored.start)
        while left:
            count = stream.readinto(room[: min(left, _READ_BYTES)])
            if not count:
                return
            yield room[:count]
            left -= count


def _metadata_digest(metadata: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def _started(dtype: str, shape: tuple[int, ...]) -> hashlib._Hash:
    return hashlib.sha256(f"{dtype} {list(shape)}\n".encode())


def _raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as they are stored; on the CPU without a copy."""
    flat: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _threads() -> int:
    return min(_MOST_THREADS, os.cpu_count() or 1)
