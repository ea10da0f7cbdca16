"""A device by name, and what kernels' plans depend on of a GPU: its generation and its multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from quantkit.cuda.architectures import Architecture, architecture
from quantkit.errors import DeviceError


@dataclass(frozen=True)
class Gpu:
    """What a plan depends on: the generation and the number of multiprocessors."""

    architecture: Architecture
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
def gpu_of(device: torch.device) -> Gpu:
    """What plans depend on of a GPU of this machine. Raises KernelError below compute capability 8.0."""
    properties = torch.cuda.get_device_properties(device)
    return Gpu(architecture(properties.major, properties.minor), properties.multi_processor_count)


def raw_stream(index: int) -> int:
    """The current CUstream of the GPU of this number; a torch.cuda.Stream takes as long as a launch."""
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream
