"""The few names of vLLM that the plugin imports, and a layer to stand in for one of vLLM's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

SETTINGS = SimpleNamespace(
    load_config=SimpleNamespace(load_format="auto"),
    parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    scheduler_config=SimpleNamespace(max_num_seqs=256),
    quant_config=None,
    lora_config=None,
)


class LinearBase(nn.Module):
    """A vLLM Linear as the plugin sees it."""

    def __init__(self, rank: int = 0, ranks: int = 1, replicas: int = 1):
        super().__init__()
        self.tp_rank, self.tp_size, self.num_kv_head_replicas = rank, ranks, replicas
        self.bias: Tensor | None = None


class UnquantizedLinearMethod:
    """vLLM's own."""


class QuantizationConfig:
    """vLLM's base, which models tell what they fuse."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class ParallelLMHead(nn.Module):
    """No LinearBase in vLLM either; its rows are padded to equal numbers on all ranks."""

    def __init__(self, vocabulary: int, rank: int = 0, ranks: int = 1, padding: int = 64):
        super().__init__()
        padded = -(-vocabulary // padding) * padding
        self.org_vocab_size, self.rows = vocabulary, padded // ranks
        start = rank * self.rows
        end = min(vocabulary, start + self.rows)
        self.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)


class RoutedExperts(nn.Module):
    """vLLM's layer of a block's experts as the plugin sees it; experts: number on all ranks, own: those of this one."""

    swiglu_limit = None
    apply_router_weight_on_input = False

    def __init__(self, experts: int, own: list[int] | None = None, rank: int = 0, ranks: int = 1):
        super().__init__()
        mine = list(range(experts)) if own is None else own
        places = torch.full((experts,), -1, dtype=torch.int32)
        places[mine] = torch.arange(len(mine), dtype=torch.int32)
        self.local_num_experts, self.expert_map = len(mine), None if own is None else places
        self.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: int(places[expert]))
        self.moe_config = SimpleNamespace(
            num_experts=experts,
            tp_rank=rank,
            tp_size=ranks,
            has_bias=False,
            is_lora_enabled=False,
            activation=SimpleNamespace(value="silu"),
        )


class FusedMoEMethodBase:
    """vLLM's base of the methods of experts."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe


class CustomOp(nn.Module):
    """vLLM's base of small ops, for which a plugin can put in its own."""

    @classmethod
    def register_oot(cls, name: str) -> Callable[[type], type]:
        def keep(op: type) -> type:
            PUT_IN[name] = op
            return op

        return keep

    def forward(self, *given: Any) -> Any:
        return self.forward_cuda(*given)


class RMSNorm(CustomOp):
    """vLLM's."""

    def __init__(self, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon, self.has_weight, self.variance_size_override = eps, True, None

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        normal = torch.nn.functional.rms_norm(total, total.shape[-1:], self.weight.to(x.dtype), self.variance_epsilon)
        return normal if residual is None else (normal, total)

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        return self.forward_native(x, residual)


class SiluAndMul(CustomOp):
    """vLLM's."""

    def __init__(self, *, compile_native: bool = True):
        super().__init__()
        self.compile_native = compile_native

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def forward_cuda(self, x: Tensor) -> Tensor:
        return self.forward_native(x)


class RotaryEmbedding(CustomOp):
    """vLLM's, of angles made up."""

    def __init__(self, head_size: int, rotary_dim: int, most_positions: int, is_neox_style: bool, dtype: torch.dtype):
        super().__init__()
        self.head_size, self.is_neox_style = head_size, is_neox_style
        self.cos_sin_cache = torch.cat([torch.rand(most_positions, rotary_dim // 2) for _ in range(2)], -1).to(dtype)

    def _match_cos_sin_cache_dtype(self, query: Tensor) -> Tensor:
        return self.cos_sin_cache.to(query.dtype)

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return self._turned(positions, query), None if key is None else self._turned(positions, key)

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return self.forward_native(positions, query, key)

    def _turned(self, positions: Tensor, x: Tensor) -> Tensor:
        cosines, sines = self._match_cos_sin_cache_dtype(x)[positions.flatten()].unsqueeze(-2).chunk(2, -1)
        half, heads = cosines.shape[-1], x.unflatten(-1, (-1, self.head_size))
        if self.is_neox_style:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        else:
            first, second = heads[..., : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        turned = first * cosines - second * sines, second * cosines + first * sines
        joined = torch.cat(turned, -1) if self.is_neox_style else torch.stack(turned, -1).flatten(-2)
        return torch.cat((joined, heads[..., 2 * half :]), -1).flatten(-2)


class Llama3RotaryEmbedding(RotaryEmbedding):
    """vLLM's."""


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    """vLLM's."""


ROTATIONS = (RotaryEmbedding, Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding)
PUT_IN: dict[str, type] = {}


class Logger:
    """vLLM's, which says a thing once."""

    said: ClassVar[list[str]] = []

    def warning_once(self, message: str, *arguments: object) -> None:
        self.said.append(message % arguments)


REGISTERED: dict[str, Any] = {}


def register_quantization_config(name: str) -> Callable[[type], type]:
    def keep(cls: type) -> type:
        REGISTERED[name] = cls
        return cls

    return keep


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the names where the plugin imports them from, and forget the plugin afterwards."""
    layers = "vllm.model_executor.layers"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: SETTINGS},
        "vllm.logger": {"init_logger": lambda name: Logger()},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": PUT_IN},
        f"{layers}.activation": {"SiluAndMul": SiluAndMul},
        f"{layers}.layernorm": {"RMSNorm": RMSNorm},
        f"{layers}.rotary_embedding": {cls.__name__: cls for cls in ROTATIONS},
        layers: {},
        f"{layers}.fused_moe": {"RoutedExperts": RoutedExperts, "FusedMoEMethodBase": FusedMoEMethodBase},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        f"{layers}.linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": object,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{layers}.vocab_parallel_embedding": {"ParallelLMHead": ParallelLMHead},
        f"{layers}.quantization": {"register_quantization_config": register_quantization_config},
        f"{layers}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    PUT_IN.clear()
    for name in ("between", "config", "gated", "linear", "experts"):
        monkeypatch.delitem(sys.modules, f"quantkit.integrations.vllm.{name}", raising=False)


def feed(layer: nn.Module, tensors: dict[str, Tensor], shard_id: str | int | None = None) -> None:
    """Hand a layer the stored tensors of one Linear, as vLLM's loaders do."""
    for name, tensor in tensors.items():
        parameter: Any = dict(layer.named_parameters())[name]
        if shard_id is None:
            parameter.weight_loader(parameter, tensor)
        else:
            parameter.weight_loader(parameter, tensor, shard_id)


def fill_as_dummy(layer: nn.Module) -> None:
    """What vLLM's dummy loader does."""
    for tensor in layer.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(-1e-3, 1e-3)
