"""What every storage format is: a spec, named tensors of fixed shape, and an exact dequantize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
Shape = tuple[int, int]  # (N, K) of the Linear
# Metadata of a spec's field that versions before it lack: config.json leaves it out at its default, for them to read.
ADDED_LATER: Mapping[str, Any] = {"added_later": True}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one stored tensor; N at dim -2 and K at dim -1, so sharding works unaided.

    largest: of unsigned codes, where not all that the dtype holds mean something.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    largest: int | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Whether no code of a tensor is larger."""
        return self.largest is None or not tensor.numel() or int(tensor.max()) <= self.largest


@dataclass(frozen=True)
class Format:
    """One row of FORMATS: how the packed weight of one Linear is stored and what it stands for.

    Several methods may write one format: BCQ, RTN and GPTQ all write ``bcq``.

    spec: frozen dataclass of JSON values; with (N, K) it fixes every tensor's shape before loading.
    tensors: (spec, shape) -> the stored tensors' shapes and dtypes.
    dequantize: (spec, tensors, shape) -> [N, K] fp32; the format's definition.
    weight_bits, act_bits: spec -> bits, for reports; 16 = not quantized.
    indices: names of the stored tensors that kernels read memory by.
    check_indices: (spec, those tensors, shape) -> None; raises ValueError where they lead outside.
    """

    spec: type[Any]
    tensors: Callable[[Any, Shape], dict[str, TensorSpec]]
    dequantize: Callable[[Any, Tensors, Shape], Tensor]
    weight_bits: Callable[[Any], int]
    act_bits: Callable[[Any], int] = lambda spec: 16
    indices: tuple[str, ...] = ()
    check_indices: Callable[[Any, Tensors, Shape], None] = lambda spec, tensors, shape: None


@dataclass(frozen=True)
class PackedWeight:
    """What a quantizer returns for one Linear: the format's spec, its tensors, and measurements to report.

    shape: (N, K) of the Linear.
    report: JSON numbers and strings shown by ``quantkit inspect`` (relative error, KL ratio, ...).
    """

    spec: Any
    shape: Shape
    tensors: Tensors
    report: Mapping[str, Any]

    def to(self, device: Any) -> PackedWeight:
        """The same with its tensors on a device."""
        return replace(self, tensors={name: tensor.to(device) for name, tensor in self.tensors.items()})
