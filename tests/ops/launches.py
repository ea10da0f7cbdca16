"""Running the GPU halves of ops without a GPU: launches are kept as data, and compared with the kernels' sources."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from quantkit.cuda.architectures import Architecture
from quantkit.cuda.device import gpu_of
from quantkit.cuda.driver import FixedLaunch, LoadedKernel
from quantkit.cuda.launch import FixedLaunches, Launch
from quantkit.cuda.parameters import kernel_parameters
from quantkit.cuda.tensor_map import MAP_BYTES
from quantkit.ops.bcq import bound, gemm_launch
from quantkit.ops.bipolar import fused

PROCESSORS = 20
MOST_GRID = (2**31 - 1, 65535, 65535)
MOST_THREADS = 1024


class Recorder:
    """Launches in the order in which they would have run on a GPU of this generation, each checked when it comes."""

    def __init__(self, row: Architecture):
        self.row, self.launches = row, list[Launch]()

    def take(self, launch: Launch) -> None:
        launch.check()
        assert all(1 <= size <= most for size, most in zip(launch.grid, MOST_GRID, strict=False)), launch.grid
        assert 0 < launch.block <= MOST_THREADS
        assert launch.block % 32 == 0
        shared_mem = launch.unit.shared_mem if launch.shared_mem is None else launch.shared_mem
        assert shared_mem <= self.row.shared_limit()
        assert launch.cluster == 1 or (self.row.clusters and launch.grid[0] % launch.cluster == 0)
        self.launches.append(launch)

    def fix(self, launch: Launch, names: tuple[str, ...]) -> FixedLaunch:
        """Taken once, when it is made."""
        self.take(launch)
        known = {parameter.name for parameter in kernel_parameters(launch.unit.source, launch.unit.function)}
        assert set(names) <= known
        idle = SimpleNamespace(queue_fixed=lambda *call: None)
        return FixedLaunch(cast(LoadedKernel, idle), b"", b"", (), None)

    @property
    def functions(self) -> list[str]:
        return [launch.unit.function for launch in self.launches]


def record(monkeypatch: pytest.MonkeyPatch, row: Architecture) -> Recorder:
    """Until the end of the test CPU tensors count as on a GPU of this generation, and kernels do not run."""
    recorder = Recorder(row)
    major, minor = row.capability
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: row.title)
    monkeypatch.setattr(Launch, "run", lambda launch: recorder.take(launch))
    monkeypatch.setattr(Launch, "fixed", lambda launch, *names: recorder.fix(launch, names))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(FixedLaunches, "run", lambda kept, key, make, device, pointers: recorder.take(make()))
    bound.forget_products()
    for module in (gemm_launch, bound, fused):
        monkeypatch.setattr(module, "zero_counts", lambda count, device: torch.zeros(count, dtype=torch.int32))
    monkeypatch.setattr(bound, "encoded_map", lambda *matrix: bytes(MAP_BYTES))
    gpu_of.cache_clear()
    return recorder
