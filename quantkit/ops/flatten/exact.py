"""Exact products of INT8 codes on a CPU.

torch's library adds pairs of INT8 products in 16 bits, which saturate, on processors without VNNI (or with oneDNN held
below it by ONEDNN_MAX_CPU_ISA). It says nothing of that, so its product is tried once and taken only where it is exact.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_LARGEST = 127
_PROBE = (16, 64)
_EXACT_COLUMNS = 1024  # 127 * 127 * 1024 < 2^24: fp32 sums of so many products are exact


def int8_product(acts: Tensor, codes: Tensor) -> Tensor:
    """acts codes^T: [M, K] and [N, K] int8 within -127..127 -> [M, N] int32, exact."""
    if _library_is_exact():
        return torch._int_mm(acts, codes.t())
    total = torch.zeros(acts.shape[0], codes.shape[0], dtype=torch.int32)
    for a, w in zip(acts.split(_EXACT_COLUMNS, dim=1), codes.split(_EXACT_COLUMNS, dim=1), strict=True):
        total += (a.float() @ w.float().t()).to(torch.int32)
    return total


@cache
def _library_is_exact() -> bool:
    codes = torch.full(_PROBE, _LARGEST, dtype=torch.int8)
    return bool((torch._int_mm(codes, codes.t()) == _PROBE[1] * _LARGEST**2).all())
