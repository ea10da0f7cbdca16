"""The OPS table with every family imported, and its samples on a device."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from quantkit.cuda.architectures import Architecture, Kernel
from quantkit.cuda.device import gpu_of
from quantkit.ops.bcq.experts import ExpertsKernel
from quantkit.ops.instances import INSTANCES
from quantkit.ops.registry import OPS, Op

for _family in INSTANCES:
    import_module(f"quantkit.ops.{_family}.op")
import_module("quantkit.ops.bcq.gated")

NAMES = sorted(OPS)


def samples_on(op: Op, device: torch.device) -> Iterator[Any]:
    """The op's samples that the device gets, with their tensors on it, each an allocation of its own."""
    for sample in op.samples():
        if device.type == "cuda" and not is_asked_for(sample, gpu_of(device).architecture):
            continue
        yield op.arguments(*(value.to(device) if isinstance(value, torch.Tensor) else value for value in sample))


def is_asked_for(sample: Any, row: Architecture) -> bool:
    """Whether a GPU of this generation gets the sample.

    Its bcq kernels by name, nibbles where it has INT4 products.
    """
    named, acts = getattr(sample, "implementation", "auto"), getattr(sample, "act_tiles", None)
    packed = getattr(sample, "packed", False) or (acts is not None and acts.dtype == torch.uint8)
    if named == ExpertsKernel.GEMV:
        named = Kernel.BCQ_BINARY_GEMV
    return (named in ("auto", ExpertsKernel.GEMM) or Kernel(named) in row.kernels) and (
        not packed or Kernel.INT4_GEMM_MMA in row.kernels
    )
