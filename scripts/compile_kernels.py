"""Compiles every kernel instance for this machine's GPU into the user's cache, on all cores.

python scripts/compile_kernels.py [PREFIX ...]: only sources whose name starts so.
Without it each instance is compiled when it is first used, in about half a second.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from quantkit.cuda.architectures import architecture
from quantkit.cuda.compile import cached_cubin
from quantkit.ops.instances import all_units
from scripts.common import needed_gpu, run_script


def main() -> None:
    row = architecture(*torch.cuda.get_device_capability(needed_gpu()))
    wanted = tuple(sys.argv[1:])
    units = [unit for unit in all_units(row) if unit.source.file.startswith(wanted or ("",))]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(cached_cubin, row=row), units))
    print(f"{len(units)} kernels ready for {row.title}")


if __name__ == "__main__":
    run_script(main)
