"""The OPS table with every family imported, and its samples on a device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from quantkit.ops.instances import INSTANCES
from quantkit.ops.registry import OPS, Op

for _family in INSTANCES:
    import_module(f"quantkit.ops.{_family}.op")

NAMES = sorted(OPS)


def samples_on(op: Op, device: torch.device) -> Iterator[Any]:
    """The op's samples with their tensors on the device, each an allocation of its own."""
    for sample in op.samples():
        yield op.arguments(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in sample))
