"""Norms, gated activations and rotary embeddings of a served model, by kernels that overlap with the products.

A product asks for its weights before its predecessor has ended, where that one allows it (programmatic dependent
launch), and these start while the product before them ends. vLLM's own kernels do neither. vLLM builds these classes in
place of its own in every model (``register_oot``); in a model that is not quantkit's they do what vLLM's do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import (
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

from quantkit.checkpoint.config import QUANT_METHOD
from quantkit.cuda.device import gpu_of
from quantkit.ops.decode.layout import can_norm
from quantkit.ops.decode.op import add_rms_norm, gated_halves, rms_norm, rotate_heads

_FEWEST_FEATURES = 1024
"""K of the narrowest norm that one block a row suits; norms of attention heads are narrower."""


def _is_ours() -> bool:
    """Whether the model being built is quantkit's, on a GPU whose launches overlap."""
    quantization = get_current_vllm_config().quant_config
    device = torch.empty(0).device
    ours = quantization is not None and quantization.get_name() == QUANT_METHOD
    return ours and device.type == "cuda" and gpu_of(device).architecture.overlap


class EarlyRMSNorm(RMSNorm):
    """vLLM's RMSNorm, whose forward_cuda is forward_native unless vLLM is told to be invariant to batches."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.ours = _is_ours() and self.has_weight and self.variance_size_override is None

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The norm of x [..., K], or (norm, sum) of x + residual."""
        if not self._takes(x):
            return super().forward_native(x, residual)
        if residual is None:
            return rms_norm(x, self.weight.data, self.variance_epsilon)
        total, normal = add_rms_norm(x, residual, self.weight.data, self.variance_epsilon).unbind()
        return normal, total

    def _takes(self, x: Tensor) -> bool:
        return self.ours and x.shape[-1] >= _FEWEST_FEATURES and can_norm(x) and self.weight.dtype == x.dtype


class EarlySiluAndMul(SiluAndMul):
    """vLLM's SiluAndMul. passes: whether the product before it ends with it."""

    def __init__(self, **named: Any):
        ours = _is_ours()
        super().__init__(**(named | {"compile_native": False} if ours else named))
        self.ours, self.passes = ours, False

    def forward_native(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x = (gate, up) [..., 2 N]; x as it is where it passes."""
        if self.passes:
            return x
        return gated_halves(x, "silu") if self.ours else SiluAndMul.forward_native(x)

    def forward_cuda(self, x: Tensor) -> Tensor:
        """The same."""
        return self.forward_native(x) if self.ours or self.passes else super().forward_cuda(x)


class EarlyRotation(RotaryEmbedding):
    """vLLM's RotaryEmbedding, of which a process has one for equal sizes: that of the first model built."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.ours = _is_ours() and self.is_neox_style

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        """query and key [M, heads * head_size] with the embedding of positions [M]."""
        if not (self.ours and key is not None and positions.dim() == 1 and query.dim() == 2):
            return super().forward_native(positions, query, key)
        cos_sin = self._match_cos_sin_cache_dtype(query)
        both = rotate_heads(query, key, positions, cos_sin, self.head_size)
        return both.split((query.shape[1], key.shape[1]), -1)

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        """The same."""
        return (self.forward_native if self.ours else super().forward_cuda)(positions, query, key)


class EarlyLlama3Rotation(EarlyRotation, Llama3RotaryEmbedding):
    """The same of Llama 3.1's angles."""


class EarlyYaRNRotation(EarlyRotation, YaRNScalingRotaryEmbedding):
    """The same of YaRN's angles."""


_OWN = {
    "RMSNorm": EarlyRMSNorm,
    "SiluAndMul": EarlySiluAndMul,
    "RotaryEmbedding": EarlyRotation,
    "Llama3RotaryEmbedding": EarlyLlama3Rotation,
    "YaRNScalingRotaryEmbedding": EarlyYaRNRotation,
}
for _name, _own in _OWN.items():
    if _name not in op_registry_oot:  # another plugin's goes first
        CustomOp.register_oot(name=_name)(_own)
