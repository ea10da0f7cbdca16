"""Experts of a loaded model on a GPU: one product for all that take the input, one for all that take what lies between.

The tensors of a block's experts become parts of one (merged_linears.py), where they stand one after the other. The host
never learns which tokens went where, so a CUDA graph can hold a decoding step. Elsewhere, for activations in fp32, and
where the experts of a block differ, they run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.cuda.device import gpu_of
from quantkit.models.experts import RoutedExperts, SeparateExperts
from quantkit.nn.bcq_linear import prepared_weight
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.bcq.experts import MOST_EXPERTS, fits_experts
from quantkit.ops.bcq.gemm import GEMM_TYPES
from quantkit.ops.bcq.op import bcq_experts
from quantkit.runtime.merged_linears import are_tiled_alike, joined_bias, joined_tensors
from quantkit.runtime.twin import is_watched


@dataclass(frozen=True, eq=False)
class ExpertsWeight:
    """What every expert multiplies by at one place. tensors: all experts' prepared ones. bias: [experts, N] or None."""

    tensors: dict[str, Tensor]
    bias: Tensor | None
    out_features: int
    group_size: int

    @classmethod
    def of(cls, linears: Sequence[Sequence[QuantizedLinear]]) -> ExpertsWeight:
        """Of each expert's Linears of one input, whose outputs stand side by side."""
        modules = [module for own in linears for module in own]
        out_features, bias = sum(module.out_features for module in linears[0]), joined_bias(modules)
        stacked = None if bias is None else bias.view(len(linears), out_features)
        return cls(joined_tensors(modules), stacked, out_features, modules[0].spec.group_size)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """y [pairs, N] for x [tokens or pairs, K]."""
        return bcq_experts(
            x,
            chosen,
            self.tensors["tiles"],
            self.tensors["scale_tiles"],
            self.bias,
            self.out_features,
            self.group_size,
            factor_tiles=self.tensors.get("factor_tiles"),
        )


@dataclass(frozen=True, eq=False)
class GroupedExperts:
    """All experts of a block at once, as RoutedExperts.together takes it."""

    first: ExpertsWeight
    last: ExpertsWeight
    between: Callable[[Tensor], Tensor]
    norm: nn.Module | None

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = self.last(self.between(self.first(x, chosen)), chosen)
        return y if self.norm is None else self.norm(y)


def group_experts(model: nn.Module) -> None:
    """Let the experts of every block run at once wherever they can, also once the model has moved or loaded others."""
    for module in model.modules():
        if isinstance(module, RoutedExperts) and module.group is None:
            module.group = grouped
            module.register_load_state_dict_post_hook(lambda experts, _keys: experts.regroup())
            module.regroup()


def grouped(experts: RoutedExperts) -> GroupedExperts | None:
    """The experts of a block as one; None where they are not on a GPU, not alike, or hooks watch one of them.

    Their tensors become views of one.
    """
    children = [experts.get_submodule(str(index)) for index in range(experts.num_experts)]
    first: list[list[Any]] = [[child.get_submodule(name) for name in experts.names.first] for child in children]
    last: list[list[Any]] = [[child.get_submodule(experts.names.last)] for child in children]
    alike = all(_run_at_once([linear for own in linears for linear in own]) for linears in (first, last))
    if not alike or experts.num_experts > MOST_EXPERTS:
        return None
    return GroupedExperts(ExpertsWeight.of(first), ExpertsWeight.of(last), experts.between, experts.post_expert_norm)


def _run_at_once(linears: Sequence[Any]) -> bool:
    if not are_tiled_alike(linears) or any(map(is_watched, linears)):
        return False
    first: QuantizedLinear = linears[0]
    weight, spec = prepared_weight(first.spec, first.held, first.shape), first.spec
    device = weight.tiles.device
    return (
        device.type == "cuda"
        and not weight.order.for_batches
        and not spec.rotate_inputs
        and fits_experts(
            torch.float16,  # as bf16
            gpu_of(device).architecture,
            weight_bits=spec.weight_bits,
            group_size=spec.group_size,
            in_features=first.in_features,
        )
    )


def run_by_host(model: Any) -> bool:
    """Whether the model has experts that the host calls, once it knows which tokens go where."""
    blocks = [module for module in model.modules() if isinstance(module, SeparateExperts)]
    if blocks and model.dtype not in GEMM_TYPES:
        return True
    return any(not isinstance(block, RoutedExperts) or block.together is None for block in blocks)
