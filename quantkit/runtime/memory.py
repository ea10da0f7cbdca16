"""How much memory is free where tensors are to be made."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors on the device can take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
