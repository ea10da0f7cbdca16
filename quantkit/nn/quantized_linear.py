"""The one module that stands where a quantized Linear stood, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn

from quantkit.formats.base import PackedWeight
from quantkit.formats.flatten import FlattenSpec
from quantkit.formats.table import FORMATS, format_name
from quantkit.nn.table import LINEARS, Layout


class Sharing(Protocol):
    """A Linear's part of a product that it has in common with others (runtime/shared_products.py)."""

    def __call__(self, module: QuantizedLinear, x: Tensor) -> Tensor:
        """The module's y [..., N] for x [..., K]."""

    def holds(self, module: QuantizedLinear) -> bool:
        """Whether the module's tensors still are those of the product."""


class QuantizedLinear(nn.Module):
    """y = x W^T + bias with W in a packed format.

    The stored tensors are Parameters without gradient, under the format's names, so that transformers and
    accelerate load, shard and offload them like any weight. Their dtypes never follow ``.to(dtype)``.
    On a GPU ``prepare`` replaces them by the kernels' order; the state dict stays canonical, bit for bit.
    """

    _hf_quantized_needs_local_tp = True  # transformers' tensor parallelism then hands forward plain local shards

    bias: nn.Parameter | None
    layout: Layout = "latency"
    """What ``prepare`` makes its order for."""
    follower: Callable[[Tensor], Any] | None = None
    """What runs in place of the product while the layers behind take more than a tensor (runtime/fused_ffn.py)."""
    shared: Sharing | None = None
    """What gives y where other Linears read the same input."""

    def __init__(self, spec: Any, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: Any):
        super().__init__()
        self.spec, self.in_features, self.out_features, self.compute_dtype = spec, in_features, out_features, dtype
        self.format_name = format_name(spec)
        for name, tensor in FORMATS[self.format_name].tensors(spec, self.shape).items():
            self.register_parameter(name, _frozen(torch.empty(tensor.shape, dtype=tensor.dtype, device=device)))
        self.prepared = False
        self.register_parameter(
            "bias", _frozen(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        )

    @classmethod
    def from_packed(cls, packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype) -> QuantizedLinear:
        """The module holding a quantizer's result; ``bias`` is copied in ``dtype``."""
        out_features, in_features = packed.shape
        module = cls(packed.spec, in_features, out_features, bias is not None, dtype, device="meta")
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
        """The format's tensors by name, restored from the kernels' order where they are in it."""
        return self._restored() if self.prepared else self.held

    @property
    def weight(self) -> Tensor:
        """A stand-in of the right shape, dtype and device that takes no memory (model code asks for these)."""
        weight = torch.zeros((), dtype=self.compute_dtype, device=self._device).expand(self.shape)
        weight._is_hf_initialized = True  # type: ignore[attr-defined]  # keeps _init_weights away from it
        return weight

    def dequantize(self) -> Tensor:
        """The weight that the stored tensors stand for, [N, K] fp32."""
        return FORMATS[self.format_name].dequantize(self.spec, self.tensors, self.shape)

    def forward(self, x: Tensor) -> Any:
        """x [..., K] -> y [..., N] in x's dtype; x and y may also be what the layers of a fused pair exchange."""
        if self.follower is not None:
            return self.follower(x)
        return self.multiply(x) if self.shared is None else self.shared(self, x)

    def multiply(self, x: Tensor) -> Tensor:
        """y [..., N] in x's dtype for x [..., K]."""
        row = LINEARS[self.format_name]
        if self.prepared:
            assert row.prepared_forward is not None
            return row.prepared_forward(self.spec, self.held, self.shape, x, self.bias)
        return row.forward(self.spec, self.held, x, self.bias)

    def prepare(self) -> None:
        """Replace the stored tensors by the order this device's kernels read; nothing to do for some formats."""
        prepare = LINEARS[self.format_name].preparation(self.layout)
        if self.prepared or prepare is None:
            return
        self._replace(prepare(self.spec, self.held, self.shape))
        self.prepared = True
        self._synchronize()

    def restore(self) -> None:
        """Undo ``prepare``: the canonical tensors again, bit for bit."""
        if self.prepared:
            self._replace(self._restored())
            self.prepared = False

    def prepare_for_device(self) -> None:
        """Prepared on a GPU, canonical on any other device."""
        if self._device.type == "cuda":
            self.prepare()
            self._synchronize()
        elif self._device.type == "cpu":
            self.restore()

    def empty(self) -> None:
        """Give the stored tensors and the bias up: canonical ones on the meta device stand in their places."""
        bias = self.bias
        self._replace(
            {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                for name, tensor in FORMATS[self.format_name].tensors(self.spec, self.shape).items()
            }
        )
        self.prepared = False
        if bias is not None:
            self.bias = _frozen(torch.empty_like(bias, device="meta"))

    def _synchronize(self) -> None:
        """Wait for the stored tensors: the kernels may read them before their predecessor on the stream has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def held(self) -> dict[str, Tensor]:
        """The stored tensors as they are now: every parameter but the bias."""
        return {name: p for name, p in self._parameters.items() if name != "bias" and p is not None}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.held.values())).device

    def _restored(self) -> dict[str, Tensor]:
        row = LINEARS[self.format_name]
        assert row.restore is not None
        return row.restore(self.spec, self.held, self.shape)

    def _replace(self, tensors: Mapping[str, Tensor]) -> None:
        bias = self._parameters.pop("bias")
        self._parameters.clear()
        self.shared = None
        for name, tensor in tensors.items():
            self.register_parameter(name, _frozen(tensor))
        self.register_parameter("bias", bias)

    def __getstate__(self) -> dict[str, Any]:
        """A copy's tensors are its own, so it shares no product."""
        return {name: value for name, value in self.__dict__.items() if name != "shared"}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.prepared:
            bias = destination.pop(prefix + "bias", None)
            for name in self.held:
                del destination[prefix + name]
            destination.update({prefix + name: tensor for name, tensor in self._restored().items()})
            if bias is not None:
                destination[prefix + "bias"] = bias

    def _load_from_state_dict(self, *args: Any) -> None:
        prepared = self.prepared
        self.restore()
        super()._load_from_state_dict(*args)
        if prepared:
            self.prepare()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move the stored tensors with the model but keep their dtypes: they are the format, not activations."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            stored = any(tensor is p for p in self.held.values())
            return tensor.to(moved.device) if stored and moved.dtype != tensor.dtype else moved

        super()._apply(move, recurse)
        if self.shared is not None and not self.shared.holds(self):
            self.shared = None
        if self.bias is not None:
            self.compute_dtype = self.bias.dtype
        self.prepare_for_device()
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.spec}"


def is_flatten(module: nn.Module) -> TypeGuard[QuantizedLinear]:
    """Whether the module is a Linear of the ``flatten`` format."""
    return isinstance(module, QuantizedLinear) and isinstance(module.spec, FlattenSpec)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
