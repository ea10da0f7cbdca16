"""Exact products of INT8 codes on a CPU.

torch's library adds pairs of INT8 products in 16 bits, which saturate, on processors without VNNI (or with oneDNN held
below it by ONEDNN_MAX_CPU_ISA). It says nothing of that, so its product is tried once and taken only where it is exact.
Without AVX-512 it may be a plain loop, far slower than fp32 products, so it is timed once as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_LARGEST = 127
_PROBE = (16, 64)
_TIMED, _RUNS = (64, 256, 1024), 3  # rows, features and columns; the least time counts
_EXACT_COLUMNS = 1024  # 127 * 127 * 1024 < 2^24: fp32 sums of so many products are exact


def int8_product(acts: Tensor, codes: Tensor) -> Tensor:
    """acts codes^T: [M, K] and [N, K] int8 within -127..127 -> [M, N] int32, exact."""
    if _library_is_exact() and _library_is_quick():
        return torch._int_mm(acts, codes.t())
    return _float_product(acts, codes)


def _float_product(acts: Tensor, codes: Tensor) -> Tensor:
    """The same by fp32 products of few enough columns to be exact."""
    total = torch.zeros(acts.shape[0], codes.shape[0], dtype=torch.int32)
    for a, w in zip(acts.split(_EXACT_COLUMNS, dim=1), codes.split(_EXACT_COLUMNS, dim=1), strict=True):
        total += (a.float() @ w.float().t()).to(torch.int32)
    return total


@cache
def _library_is_exact() -> bool:
    codes = torch.full(_PROBE, _LARGEST, dtype=torch.int8)
    return bool((torch._int_mm(codes, codes.t()) == _PROBE[1] * _LARGEST**2).all())


@cache
def _library_is_quick() -> bool:
    """Whether it takes no longer than fp32 products do; which of the two is taken changes no bit."""
    rows, features, columns = _TIMED
    acts, codes = (torch.ones(count, columns, dtype=torch.int8) for count in (rows, features))
    library = _least_seconds(lambda: torch._int_mm(acts, codes.t()))
    return library <= _least_seconds(lambda: _float_product(acts, codes))


def _least_seconds(product: Callable[[], Tensor]) -> float:
    seconds = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
