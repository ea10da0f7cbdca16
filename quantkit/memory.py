"""How much memory is free where tensors are to be made."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors on the device can take; on a GPU also what torch keeps of tensors that are gone."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return int(psutil.virtual_memory().available)
