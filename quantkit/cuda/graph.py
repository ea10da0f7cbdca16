"""Capturing calls in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Call = Callable[[], Any]

DEVICE_LOCK = RLock()
"""Held while a graph is captured, and by what waits for a whole device: the one breaks the other in another thread."""


class FilledScalars(TorchFunctionMode):
    """Makes torch.tensor(number, device=...) a fill: a copy from the host, as in masks, cannot be captured."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call func, or torch.full in the place of torch.tensor."""
        if func is torch.tensor and isinstance(args[0], int | float):
            func, args = torch.full, ((), *args)
        return func(*args, **(kwargs or {}))


def capture(calls: Sequence[Call], device: torch.device, warm_up: Sequence[Call] | None = None) -> torch.cuda.CUDAGraph:
    """One CUDA graph running the calls in order.

    warm_up: what runs before, so that kernels are loaded; by default the first two calls.
    """
    with DEVICE_LOCK, torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2] if warm_up is None else warm_up:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"), FilledScalars():
            for call in calls:
                call()
    return graph
