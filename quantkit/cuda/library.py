"""The NVIDIA driver's library."""

from __future__ import annotations

import ctypes
from functools import cache

from quantkit.errors import KernelError


@cache
def cuda_library() -> ctypes.CDLL:
    """libcuda. Raises KernelError where it cannot be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelError("the NVIDIA driver library libcuda.so.1 cannot be loaded; install the driver") from error
