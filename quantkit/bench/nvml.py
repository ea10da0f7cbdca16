"""NVML, the driver's own readings of a GPU, through nvidia-ml-py."""

from __future__ import annotations

from typing import Any

import torch

from quantkit.errors import BenchError


def open_nvml(device: torch.device) -> tuple[Any, Any]:
    """The pynvml module and its handle of a GPU.

    Raises BenchError without nvidia-ml-py or where NVML does not know the GPU.
    """
    try:
        import pynvml
    except ImportError as error:
        raise BenchError("readings of the GPU need nvidia-ml-py: pip install 'quantkit[energy]'") from error
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError as error:
        raise BenchError(f"NVML gives no reading of this GPU ({error})") from error


def sm_megahertz(device: torch.device) -> int | None:
    """The clock at which the multiprocessors run now, or None where NVML cannot say."""
    try:
        pynvml, handle = open_nvml(device)
    except BenchError:
        return None
    try:
        return int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
    except pynvml.NVMLError:
        return None
