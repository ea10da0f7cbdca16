"""How much memory there is, and how much of it is free, where tensors are to be made."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors on the device can take; on a GPU also what torch keeps of tensors that are gone."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return int(psutil.virtual_memory().available)


def total_bytes(device: torch.device) -> int:
    """All memory of the device, whoever uses it: what is chosen by it is the same whenever it is asked."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)
