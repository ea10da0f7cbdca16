"""A few launches of bcq_binary_gemv for a profiler: ncu -k regex:bcqBinary python scripts/nuqmm/profile_bcq.py."""

from __future__ import annotations

import torch

from quantkit.ops.bcq.launch import tensor_core_gemv
from quantkit.ops.bcq.product import Product
from scripts.common import needed_gpu, run_script
from scripts.nuqmm.tune_bcq import random_tiles


def main() -> None:
    device = needed_gpu()
    for bits, size in ((1, 4096), (1, 16384), (4, 16384)):
        x = torch.randn(1, size, device=device).half()
        tensor_core_gemv(Product.of(x, random_tiles(bits, (size, size), 128, offset=False), None), int8=False)
    torch.cuda.synchronize()


if __name__ == "__main__":
    run_script(main)
