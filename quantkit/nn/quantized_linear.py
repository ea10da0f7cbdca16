"""The one module that stands where a quantized Linear stood, whatever its format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.formats.base import PackedWeight
from quantkit.formats.table import FORMATS, format_name
from quantkit.nn.table import LINEARS


class QuantizedLinear(nn.Module):
    """y = x W^T + bias with W in a packed format.

    The stored tensors are Parameters without gradient, under the format's names, so that transformers and
    accelerate load, shard and offload them like any weight. Their dtypes never follow ``.to(dtype)``.
    """

    _hf_quantized_needs_local_tp = True  # transformers' tensor parallelism then hands forward plain local shards

    def __init__(self, spec: Any, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: Any):
        super().__init__()
        self.spec, self.in_features, self.out_features, self.compute_dtype = spec, in_features, out_features, dtype
        self.format_name = format_name(spec)
        for name, tensor in FORMATS[self.format_name].tensors(spec, self.shape).items():
            self.register_parameter(name, _frozen(torch.empty(tensor.shape, dtype=tensor.dtype, device=device)))
        self._fields = tuple(self._parameters)
        self.register_parameter(
            "bias", _frozen(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        )

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantizedLinear:
        """The module holding a quantizer's result; ``bias`` is copied in ``dtype``."""
        rows, columns = packed.shape
        module = cls(packed.spec, columns, rows, bias is not None, dtype, device="meta")
        for name, tensor in packed.tensors.items():
            setattr(module, name, _frozen(tensor.contiguous()))
        if bias is not None:
            module.bias = _frozen(bias.detach().to(dtype).clone())
        return module

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight."""
        return self.out_features, self.in_features

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The format's tensors by name."""
        return {name: self._parameters[name] for name in self._fields}  # type: ignore[misc]

    @property
    def weight(self) -> Tensor:
        """A stand-in of the right shape, dtype and device that takes no memory (model code asks for these)."""
        anchor = self._parameters[self._fields[0]]
        assert anchor is not None
        weight = torch.zeros((), dtype=self.compute_dtype, device=anchor.device).expand(self.shape)
        weight._is_hf_initialized = True  # type: ignore[attr-defined]  # keeps _init_weights away from it
        return weight

    def dequantize(self) -> Tensor:
        """The weight that the stored tensors stand for, [N, K] fp32."""
        return FORMATS[self.format_name].dequantize(self.spec, self.tensors, self.shape)

    def forward(self, x: Tensor) -> Tensor:
        return LINEARS[self.format_name].forward(self.spec, self.tensors, x, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move the stored tensors with the model but keep their dtypes: they are the format, not activations."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            stored = any(tensor is p for name, p in self._parameters.items() if name in self._fields)
            return moved.to(tensor.dtype) if stored and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        if self.bias is not None:
            self.compute_dtype = self.bias.dtype
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.spec}"


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
