"""Functions of tensors that a GPU replays as one CUDA graph: solvers take thousands of steps too small to launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WARM_UPS = 2  # libraries choose their kernels and take their memory in the first calls


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Replayed:
    """``function(*tensors, *settings) -> tensors``; on a GPU captured once per set of shapes and settings.

    The function must do the same operations whatever the tensors hold, wait for nothing and change none of them.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self._function = function
        self._captured: dict[Hashable, _Captured] = {}

    def __call__(self, tensors: tuple[Tensor, ...], *settings: Hashable) -> tuple[Tensor, ...]:
        if not tensors[0].is_cuda:
            return self._function(*tensors, *settings)
        key = (tensors[0].device, tuple((tuple(each.shape), each.dtype) for each in tensors), settings)
        if key not in self._captured:
            self._captured[key] = self._capture(tensors, settings)
        captured = self._captured[key]
        for held, given in zip(captured.inputs, tensors, strict=True):
            held.copy_(given)
        captured.graph.replay()
        return tuple(each.clone() for each in captured.outputs)

    def _capture(self, tensors: tuple[Tensor, ...], settings: tuple[Hashable, ...]) -> _Captured:
        inputs = tuple(each.contiguous().clone() for each in tensors)
        side, current = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._function(*inputs, *settings)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads read and write files meanwhile, from and to the GPU.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self._function(*inputs, *settings)
        return _Captured(graph, inputs, outputs)
