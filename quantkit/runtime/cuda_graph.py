"""Capturing calls in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Call = Callable[[], Any]


class FilledScalars(TorchFunctionMode):
    """Makes torch.tensor(number, device=...) a fill: a copy from the host, as in masks, cannot be captured."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call func, or torch.full in the place of torch.tensor."""
        if func is torch.tensor and isinstance(args[0], int | float):
            func, args = torch.full, ((), *args)
        return func(*args, **(kwargs or {}))


def capture(calls: Sequence[Call], device: torch.device) -> torch.cuda.CUDAGraph:
    """One CUDA graph running the calls in order; each ran once before, so that kernels are loaded."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), FilledScalars():
            for call in calls:
                call()
    return graph
