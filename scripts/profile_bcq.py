"""A few launches of bcq_binary_gemv for a profiler: ncu -k regex:bcqBinary python scripts/profile_bcq.py."""

from __future__ import annotations

import torch

from quantkit.cli.script import needed_gpu, run_script
from quantkit.ops.bcq.launch import Product, tensor_core_gemv
from quantkit.ops.bcq.layout import BcqTiles


def main() -> None:
    device = needed_gpu()
    for bits, size in ((1, 4096), (1, 16384), (4, 16384)):
        shape = (size // 16, size // 256, bits, 128)
        tiles = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, device=device)
        scales = torch.rand(size // 16, size // 128, 8, bits, 2, device=device).half()
        weight = BcqTiles(tiles, scales, None, size, size, 128)
        x = torch.randn(1, size, device=device).half()
        tensor_core_gemv(Product.of(x, weight, None), int8=False)
    torch.cuda.synchronize()


if __name__ == "__main__":
    run_script(main)
