"""What the driver is told of a matrix that is copied by boxes, on a driver that is simulated."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.cuda import tensor_map
from quantkit.cuda.tensor_map import MAP_BYTES, TensorMap
from quantkit.errors import KernelError


class Encoder:
    """cuTensorMapEncodeTiled: notes what it is told, and writes its number of calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.code, self.argtypes = 0, ()

    def __call__(
        self, to: int, kind: int, rank: int, address: int, dims: Any, strides: Any, box: Any, steps: Any, *modes: int
    ) -> int:
        assert len(self.argtypes) == 8 + len(modes)
        assert to % 64 == 0
        told = {"address": address, "dims": [*dims], "strides": [*strides], "box": [*box], "steps": [*steps]}
        self.calls.append({**told, "kind": kind, "rank": rank, "modes": modes})
        ctypes.memset(to, len(self.calls), MAP_BYTES)
        return self.code


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Encoder]:
    made = Encoder()
    monkeypatch.setattr(tensor_map, "cuda_library", lambda: SimpleNamespace(cuTensorMapEncodeTiled=made))
    for kept in (tensor_map._encoder, tensor_map.encoded_map):
        kept.cache_clear()
    yield made
    for kept in (tensor_map._encoder, tensor_map.encoded_map):
        kept.cache_clear()


def test_columns_come_first_and_strides_are_bytes(encoder: Encoder) -> None:
    matrix = torch.zeros(5, 72, dtype=torch.bfloat16)
    assert TensorMap(matrix, 16, 64).encoded() == b"\1" * MAP_BYTES
    (told,) = encoder.calls
    assert told["address"] == matrix.data_ptr()
    assert (told["kind"], told["rank"]) == (1, 2)  # CU_TENSOR_MAP_DATA_TYPE_UINT16
    assert (told["dims"], told["strides"]) == ([72, 5], [144])
    assert (told["box"], told["steps"]) == ([64, 16], [1, 1])
    assert told["modes"] == (0, 3, 2, 0)  # not interleaved, 128-byte swizzle, 128 bytes to L2, zeros outside


def test_the_same_memory_is_described_once(encoder: Encoder) -> None:
    matrix = torch.zeros(5, 72, dtype=torch.half)
    assert TensorMap(matrix, 16, 64).encoded() == TensorMap(matrix.view(5, 72), 16, 64).encoded()
    assert TensorMap(matrix, 8, 64).encoded() != TensorMap(matrix[:4], 8, 64).encoded()
    assert len(encoder.calls) == 3


def test_the_drivers_error_is_one_line(encoder: Encoder) -> None:
    encoder.code = 1
    with pytest.raises(KernelError, match=r"matrix \[5, 72\] failed with CUDA driver error 1"):
        TensorMap(torch.zeros(5, 72, dtype=torch.half), 16, 64).encoded()


def test_a_driver_without_maps_is_an_error(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "cuda_library", lambda: SimpleNamespace())
    with pytest.raises(KernelError, match="no tensor maps; update it"):
        TensorMap(torch.zeros(5, 72, dtype=torch.half), 16, 64).encoded()
