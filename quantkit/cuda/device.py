"""What kernels' layouts depend on of a GPU: its compute capability, multiprocessors and shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quantkit.errors import DeviceError

OVERLAP_CAPABILITY = (9, 0)  # from here on a launch may start before its predecessor ends, and blocks form clusters
_SHARED_BYTES = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10}
_SHARED_BYTES_ELSEWHERE = 99 << 10
_BLOCK_RESERVE = 1 << 10  # shared memory that the system keeps per block


@dataclass(frozen=True)
class Gpu:
    """What the layout depends on: compute capability and number of multiprocessors."""

    capability: tuple[int, int]
    processors: int


def usable_device(name: str | torch.device) -> torch.device:
    """The CPU or a GPU of this machine by name. Raises DeviceError for anything else."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"`device` {name}: not a device; use cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"`device` {name}: nothing here runs on it; use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"`device` {name}: no usable GPU of that name here (see quantkit doctor); use `device` cpu")
    return device


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
