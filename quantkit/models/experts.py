"""Experts as Linears: transformers fuses those of a block into 3-D weights; here every expert gets Linears of its own.

A model of separate experts computes the same, expert after expert over the tokens routed to it. Its experts' Linears
are found, calibrated, quantized and stored like all others, and their names are the hub's: those that transformers'
weight conversion merges into the fused weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightConverter

_ROUTED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # what transformers' decorator sets on experts
_BATCHED = ("Llama4TextExperts",)
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_HUB_NAME = re.compile(r"experts\\?\.\*\\?\.(\w+)\\?\.weight$")


@dataclass(frozen=True)
class ExpertNames:
    """What the Linears of one expert are called.

    first: those that take the expert's input; their outputs, side by side, are what the gate takes. last: the other.
    """

    first: tuple[str, ...]
    last: str


class SeparateExperts(nn.Module):
    """The experts of one block, made of their fused weights: children "0", "1", ... hold the Linears by ``names``."""

    def __init__(self, fused: nn.Module, names: ExpertNames):
        super().__init__()
        self.names = names
        self.between: Callable[[Tensor], Tensor] = _between(fused)
        norm = getattr(fused, "post_expert_norm", None)
        self.post_expert_norm = norm if getattr(fused, "has_post_expert_norm", False) else None
        self.num_experts: int = _weight(fused, "down_proj")[0].shape[0]
        for index in range(self.num_experts):
            self.add_module(str(index), nn.Module())
        self.take(fused)

    def take(self, fused: nn.Module) -> None:
        """Give every expert's Linears what the fused module holds, which is left on the meta device.

        The weights are views of the fused ones, or copies of transposed ones.
        """
        names = self.names
        first, first_bias = _weight(fused, "gate_up_proj" if hasattr(fused, "gate_up_proj") else "up_proj")
        last, last_bias = _weight(fused, "down_proj")
        for index in range(self.num_experts):
            expert = self.get_submodule(str(index))
            biases = [None] * len(names.first) if first_bias is None else first_bias[index].chunk(len(names.first))
            for name, part, bias in zip(names.first, first[index].chunk(len(names.first)), biases, strict=True):
                _fill(expert, name, part, bias)
            _fill(expert, names.last, last[index], None if last_bias is None else last_bias[index])
        for key, parameter in fused.named_parameters(recurse=False):
            fused._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"))

    def run(self, index: int, x: Tensor) -> Tensor:
        """y [tokens, hidden] of one expert for x [tokens, hidden], before the routing weight."""
        expert = self.get_submodule(str(index))
        parts = [expert.get_submodule(name)(x) for name in self.names.first]
        y: Tensor = expert.get_submodule(self.names.last)(self.between(torch.cat(parts, dim=-1)))
        return y if self.post_expert_norm is None else self.post_expert_norm(y)


class RoutedExperts(SeparateExperts):
    """Experts that are handed each token's choice of experts."""

    together: Callable[[Tensor, Tensor], Tensor] | None = None
    """Runs all of them at once in 16-bit types: x [tokens, hidden], expert of every choice -> an output of each."""
    group: Callable[[RoutedExperts], Callable[[Tensor, Tensor], Tensor] | None] | None = None
    """What makes ``together`` (runtime/grouped_experts.py)."""

    def regroup(self) -> None:
        """Make ``together`` anew: the tensors of the experts are others."""
        self.together = None if self.group is None else self.group(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoutedExperts:
        self.together = None  # its tensors are not the moved ones
        super()._apply(fn, recurse)
        self.regroup()
        return self

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [tokens, hidden]; expert and weight of every choice, [tokens, top_k] each."""
        tokens, top_k = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        at_once = self.together if hidden_states.dtype in (torch.float16, torch.bfloat16) else None
        weighted = (at_once or self._one_by_one)(hidden_states, chosen) * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden_states.dtype)

    def _one_by_one(self, hidden_states: Tensor, chosen: Tensor) -> Tensor:
        """The output [pairs, hidden] of every choice; zeros for a choice of no expert."""
        counts = torch.bincount(chosen, minlength=self.num_experts)[: self.num_experts].tolist()
        pairs, top_k = chosen.argsort(stable=True)[: sum(counts)].split(counts), len(chosen) // len(hidden_states)
        # Every (token, choice) has a row of its own: adding in place would have no fixed order on a GPU.
        outputs = hidden_states.new_zeros(len(chosen), hidden_states.shape[-1])
        for index, own in enumerate(pairs):
            if len(own):
                outputs[own] = self.run(index, hidden_states[own // top_k])
        return outputs


class BatchedExperts(SeparateExperts):
    """Experts that are all handed all tokens, multiplied by their routing weight, which is 0 for the others' tokens."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [experts * tokens, hidden], expert after expert."""
        outputs = torch.zeros_like(hidden_states)
        views = zip(hidden_states.chunk(self.num_experts), outputs.chunk(self.num_experts), strict=True)
        for index, (inputs, place) in enumerate(views):
            own = inputs.any(dim=-1).nonzero()[:, 0]
            if len(own):
                place[own] = self.run(index, inputs[own])
        return outputs


def separate_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Replace all fused experts of a model by separate ones, in place; returns the fused modules by name, empty.

    Does nothing to a model without fused experts, or whose experts transformers does not describe.
    """
    fused = {name: module for name, module in model.named_modules() if is_fused(module)}
    names = hub_names(model) if fused else {}
    for name, module in fused.items():
        kind = BatchedExperts if type(module).__name__ in _BATCHED else RoutedExperts
        model.set_submodule(name, kind(module, _names(module, names)))
    return fused


@contextmanager
def fused_again(model: nn.Module, fused: Mapping[str, nn.Module]) -> Iterator[None]:
    """While entered, modules that separate_experts returned stand in their places, for transformers to load weights
    into; then the separate experts stand there again, and hold those weights."""
    separate = {name: model.get_submodule(name) for name in fused}
    for name, module in fused.items():
        model.set_submodule(name, module)
    try:
        yield
    finally:
        for name, experts in separate.items():
            model.set_submodule(name, experts)
    for name, experts in separate.items():
        assert isinstance(experts, SeparateExperts)
        experts.take(fused[name])


def is_fused(module: nn.Module) -> bool:
    """Whether the module holds the weights of several experts in 3-D parameters that can be taken apart."""
    known = {suffixed for name in _WEIGHTS for suffixed in (name, f"{name}_bias")}
    own = dict(module.named_parameters(recurse=False))
    described = all(hasattr(module, fact) for fact in _ROUTED) or type(module).__name__ in _BATCHED
    return described and "down_proj" in own and own.keys() <= known and own["down_proj"].ndim == 3


def expert_linears(model: nn.Module) -> dict[str, str]:
    """Name of every Linear of a separate expert -> name of the module that holds the block's experts."""
    found: dict[str, str] = {}
    for name, experts in model.named_modules():
        if isinstance(experts, SeparateExperts):
            for index in range(experts.num_experts):
                found |= {f"{name}.{index}.{own}": name for own in (*experts.names.first, experts.names.last)}
    return found


@contextmanager
def routing_weights(block: nn.Module) -> Iterator[Callable[[nn.Module], Tensor | None]]:
    """While entered, a function of a Linear that is being run: what each row of its input is weighted by behind it.

    None where no router weighs what the Linear gives: for any but those of RoutedExperts.
    """
    routed = [module for module in block.modules() if isinstance(module, RoutedExperts)]
    owners = {
        linear: (experts, index)
        for experts in routed
        for index in range(experts.num_experts)
        for linear in experts.get_submodule(str(index)).children()
    }
    given: dict[nn.Module, Mapping[str, Tensor]] = {}

    def keep(experts: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        given[experts] = signature(RoutedExperts.forward).bind(experts, *positional, **named).arguments

    def weights_of(linear: nn.Module) -> Tensor | None:
        if linear not in owners:
            return None
        experts, index = owners[linear]
        call = given[experts]
        # In the order in which the experts' rows are handed to them.
        return call["top_k_weights"].reshape(-1)[call["top_k_index"].reshape(-1) == index]

    with ExitStack() as hooks:
        for experts in routed:
            hooks.callback(experts.register_forward_pre_hook(keep, with_kwargs=True).remove)
        yield weights_of


def routers(model: nn.Module) -> set[str]:
    """Names of the Linears that choose or weigh experts: beside the experts, no wider than their number."""
    found: set[str] = set()
    for name, experts in model.named_modules():
        if isinstance(experts, SeparateExperts):
            beside = name.rpartition(".")[0]
            for own, module in model.get_submodule(beside).named_modules(prefix=beside):
                inside = own.startswith(f"{name}.")
                if isinstance(module, nn.Linear) and not inside and module.out_features <= experts.num_experts:
                    found.add(own)
    return found


def hub_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Fused weight -> what the hub calls its parts, from the conversions that merge them: gate_up_proj -> w1, w3."""
    # Here and below: transformers imports this module while it is only half imported itself.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist

    found: dict[str, tuple[str, ...]] = {}
    for conversion in get_model_conversion_mapping(model, add_legacy=False):  # type: ignore[arg-type]
        if merges_experts(conversion):
            parts = [_HUB_NAME.search(source) for source in conversion._original_source_patterns]
            plain = all(type(operation) in (MergeModulelist, Concatenate) for operation in conversion.operations)
            target = conversion._original_target_patterns[0].rpartition(".")[2]
            if plain and all(parts):
                found[target] = tuple(part[1] for part in parts if part)
    return found


def merges_experts(conversion: Any) -> TypeGuard[WeightConverter]:
    """Whether a weight conversion of transformers fuses the weights of single experts."""
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    if not isinstance(conversion, WeightConverter):
        return False
    return any(isinstance(operation, MergeModulelist) for operation in conversion.operations)


def _names(fused: nn.Module, hub: dict[str, tuple[str, ...]]) -> ExpertNames:
    if not hasattr(fused, "gate_up_proj"):
        first = hub.get("up_proj", ("up_proj",))
    elif getattr(fused, "is_concatenated", True):
        first = hub.get("gate_up_proj", ("gate_proj", "up_proj"))
    else:  # rows of gate and up alternate
        first = ("gate_up_proj",)
    return ExpertNames(first, hub.get("down_proj", ("down_proj",))[0])


def _between(fused: Any) -> Callable[[Tensor], Tensor]:
    """What an expert computes between its products."""
    between: Callable[[Tensor], Tensor] = fused.act_fn if not getattr(fused, "has_gate", True) else _gate(fused)
    return between


def _gate(fused: Any) -> Callable[[Tensor], Tensor]:
    if hasattr(fused, "_apply_gate"):
        gated: Callable[[Tensor], Tensor] = fused._apply_gate
        return gated
    activation = fused.act_fn

    def between(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        product: Tensor = up * activation(gate)
        return product

    return between


def _weight(fused: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight [E, N, K] and bias [E, N] or None of one fused product."""
    weight, bias = getattr(fused, name).detach(), getattr(fused, f"{name}_bias", None)
    transposed = getattr(fused, "is_transposed", type(fused).__name__ in _BATCHED)
    return (weight.transpose(1, 2) if transposed else weight), None if bias is None else bias.detach()


def _fill(expert: nn.Module, name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Give an expert's Linear, which is made where there is none yet, its weights."""
    if name not in expert._modules:
        out_features, in_features = weight.shape
        expert.add_module(name, nn.Linear(in_features, out_features, bias is not None, "meta", weight.dtype))
    linear: Any = expert.get_submodule(name)
    linear.weight = nn.Parameter(weight.contiguous())  # a copy where the fused weight is transposed
    if bias is not None:
        linear.bias = nn.Parameter(bias)
