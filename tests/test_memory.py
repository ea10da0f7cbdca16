"""What is said to be free, here and on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quantkit.memory import free_bytes

GPU = torch.device("cuda")


def test_free_memory_is_what_is_free_now_and_not_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=900, available=400, free=100))
    assert free_bytes(torch.device("cpu")) == 400


def test_what_torch_keeps_of_tensors_that_are_gone_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 25)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 10)
    assert free_bytes(GPU) == 45


@pytest.mark.cuda
def test_a_tensor_that_is_gone_leaves_as_much_free_as_before() -> None:
    before = free_bytes(GPU)
    taken = torch.empty(1 << 28, dtype=torch.uint8, device=GPU)
    assert before - free_bytes(GPU) >= taken.nbytes
    del taken
    assert before - free_bytes(GPU) < 1 << 26  # torch's own start may stay
