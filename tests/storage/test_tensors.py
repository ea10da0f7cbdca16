"""safetensors files with digests: any reader reads them, and every changed byte is found."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkit.errors import CheckpointError
from quantkit.storage.tensors import (
    DIGEST_PREFIX,
    DTYPES,
    Verification,
    read_header,
    read_into,
    tensor_digest,
    verifies,
    write_tensors,
)

METADATA = {"format": "pt", "zeta": "é", "alpha": "2"}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    return {**made, "empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0), "turned": torch.randn(4, 3).t()}


@pytest.fixture
def path(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    write_tensors(tmp_path / "a.safetensors", tensors, METADATA)
    return tmp_path / "a.safetensors"


def _verify(*paths: Path) -> int:
    return Verification(
        [read_header(path, f"file {path}", CheckpointError) for path in paths], CheckpointError
    ).finish()


def _rewrite_header(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def test_the_safetensors_library_reads_what_was_written(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))
    with safe_open(path, "pt") as file:
        assert METADATA.items() <= file.metadata().items()
    assert _verify(path) == len(tensors)


def test_the_same_tensors_give_the_same_bytes_in_any_order(
    path: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    other = tmp_path / "b.safetensors"
    write_tensors(other, dict(reversed(tensors.items())), dict(reversed(METADATA.items())))
    assert other.read_bytes() == path.read_bytes()


def test_a_file_that_stands_there_is_not_written_over(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(FileExistsError):
        write_tensors(path, tensors, METADATA)


def test_a_tensor_is_read_from_any_byte_on(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = read_header(path, "file", CheckpointError)
    for name, tensor in tensors.items():
        room = torch.empty(tensor.shape, dtype=tensor.dtype)
        read_into(room, file, name)
        assert torch.equal(room, tensor)
        content = tensor.contiguous().view(-1).view(torch.uint8)
        rest = torch.empty_like(content[3:])
        read_into(rest, file, name, 3)
        assert torch.equal(rest, content[3:])


def test_a_tensor_that_its_file_ends_in_is_not_read(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = read_header(path, "file", CheckpointError)
    last = list(file.tensors)[-1]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(OSError, match=f"ends within {last}"):
        read_into(torch.empty(tensors[last].shape, dtype=tensors[last].dtype), file, last)


def test_digest_covers_dtype_shape_and_bytes() -> None:
    x = torch.arange(6, dtype=torch.int16)
    others = [x.reshape(2, 3), x.view(torch.float16), x.flip(0)]
    assert len({tensor_digest(each) for each in (x, *others)}) == 4
    assert tensor_digest(x.reshape(2, 3).t().contiguous().t()) == tensor_digest(x.reshape(2, 3))


def test_every_changed_byte_of_a_tensor_is_found(path: Path) -> None:
    content = bytearray(path.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    for place in range(8 + length, len(content)):
        content[place] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is not what was written"):
            _verify(path)
        content[place] ^= 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"zeta":"', b'"zetb":"', "metadata in its header"),
        (b"quantkit.xxh3.scalar", b"quantkit.xxh3.scalaz", "scalar has no digest"),
        (b'"scalar":{"dtype":"F32"', b'"scalar":{"dtype":"I32"', "tensor scalar is not what was written"),
        (b'"torch.int8":', b'"torch.int9":', "torch.int8 has a digest but is missing"),
        (b'"dtype":"U8"', b'"dtype":"F4"', "cannot be read"),
    ],
    ids=["metadata", "digest-name", "dtype", "tensor-name", "unknown-dtype"],
)
def test_an_altered_header_is_found(old: bytes, new: bytes, message: str, path: Path) -> None:
    _rewrite_header(path, old, new)
    with pytest.raises(CheckpointError, match=message):
        _verify(path)


def test_files_without_digests_are_unverified_but_not_beside_others(path: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    save_file({"x": torch.ones(2)}, bare)
    assert _verify(bare) == 0
    with pytest.raises(CheckpointError, match="holds no digests, but the files beside it do"):
        _verify(path, bare)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x08" + b"\0" * 7 + b'{"a": 1}', b"\2" + b"\0" * 7 + b"[]"])
def test_what_is_no_safetensors_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^file a cannot be read \(.*\); copy it$"):
        read_header(tmp_path / "a", "file a", CheckpointError, "copy it")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        read_header(tmp_path / "pipe", "it", CheckpointError)


def test_a_file_that_shrinks_while_it_is_compared_is_refused(path: Path) -> None:
    header = read_header(path, "it", CheckpointError)
    os.truncate(path, header.tensors["scalar"].start)
    with pytest.raises(CheckpointError, match="is not what was written"):
        Verification([header], CheckpointError).finish()


def test_header_stays_readable_as_json(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert metadata[f"{DIGEST_PREFIX}scalar"] == tensor_digest(tensors["scalar"])
    assert length % 8 == 0


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)], ids=["unset", "one", "zero"])
def test_only_zero_turns_the_comparison_off(value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUANTKIT_VERIFY", raising=False)
    if value is not None:
        monkeypatch.setenv("QUANTKIT_VERIFY", value)
    assert verifies() is expected
