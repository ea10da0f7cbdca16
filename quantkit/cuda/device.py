"""What kernels' layouts depend on of a GPU: its compute capability, multiprocessors and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

OVERLAP_CAPABILITY = (9, 0)  # from here on a launch may start before its predecessor ends, and blocks form clusters
_SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}
_SHARED_BYTES_ELSEWHERE = 99 << 10
_BLOCK_RESERVE = 1 << 10  # shared memory that the system keeps per block


@dataclass(frozen=True)
class Gpu:
    """What the layout depends on: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    processors: int


@cache
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU."""
    return torch.cuda.get_device_capability(device)


def shared_limit(major: int, minor: int, resident: int = 1) -> int:
    """Bytes of shared memory that one block may use where ``resident`` blocks share a multiprocessor."""
    most = _SHARED_BYTES.get((major, minor), _SHARED_BYTES_ELSEWHERE)
    return (most + _BLOCK_RESERVE) // resident - _BLOCK_RESERVE
