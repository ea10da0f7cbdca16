"""Compiles every kernel instance for this machine's GPU into the user's cache, on all cores.

python scripts/compile_kernels.py [PREFIX ...]: only sources whose name starts so.
Without it each instance is compiled when it is first used, in about half a second.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from quantkit.cuda.compile import CompileUnit, cached_cubin, target
from quantkit.ops.instances import all_units
from scripts.common import needed_gpu, run_script


def _compile(job: tuple[CompileUnit, str]) -> None:
    cached_cubin(*job)


def main() -> None:
    major, minor = torch.cuda.get_device_capability(needed_gpu())
    wanted = tuple(sys.argv[1:])
    units = [unit for unit in all_units(major, minor) if unit.source.startswith(wanted or ("",))]
    jobs = [(unit, target(major, minor, unit.hopper)) for unit in units]
    with ProcessPoolExecutor() as pool:
        list(pool.map(_compile, jobs))
    print(f"{len(jobs)} kernels ready for compute capability {major}.{minor}")


if __name__ == "__main__":
    run_script(main)
