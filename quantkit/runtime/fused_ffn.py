"""Two ``flatten`` Linears joined by an activation function: the first product writes the second one's codes.

The models' own code stays as it is: it calls source, activation and target one after the other. While the module that
calls them runs, the source returns codes instead of y, the activation passes codes through, and the target starts from
them. Called on its own, each of the three computes what it always did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.models.families import Chain, chains_of
from quantkit.nn.flatten_linear import ActCodes, requantized_forward, takes_codes
from quantkit.nn.quantized_linear import QuantizedLinear, is_flatten
from quantkit.ops.activations import activation_name
from quantkit.ops.flatten.launch import REQUANTIZED_DTYPES
from quantkit.runtime.twin import is_watched


class PassingActivation(nn.Module):
    """An activation function that lets codes through, to which it was applied already."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return x if isinstance(x, ActCodes) else self.inner(x)


@dataclass(frozen=True, eq=False)
class FusedPair:
    """source, between, target: children of the module that calls them, by these names. activation: of ACTIVATIONS."""

    names: tuple[str, str, str]
    source: QuantizedLinear
    between: PassingActivation
    target: QuantizedLinear
    activation: str

    def arm(self, caller: nn.Module, _arguments: Any) -> None:
        """Let the source return codes until ``disarm``, where all three are as they were and nobody watches them."""
        modules = self.source, self.between, self.target
        in_place = all(caller._modules.get(name) is module for name, module in zip(self.names, modules, strict=True))
        watched = any(map(is_watched, (*modules, self.between.inner)))
        if in_place and not watched and not torch.compiler.is_compiling() and self.is_ready():
            self.source.follower = self

    def disarm(self, _caller: nn.Module, _arguments: Any, _result: Any) -> None:
        """The source returns y again."""
        if self.source.follower is not None:
            self.source.follower = None

    def __call__(self, x: Tensor) -> Tensor | ActCodes:
        """``codes`` of x, or source(x) for a type that has no kernel."""
        return self.codes(x) if x.dtype in REQUANTIZED_DTYPES else self.source.multiply(x)

    def codes(self, x: Tensor) -> ActCodes:
        """activation(source(x)) as codes of the target, for x [..., K] of a type in REQUANTIZED_DTYPES."""
        first, second = self.source, self.target
        source = first.spec, first.held, first.shape, first.bias
        return requantized_forward(source, x, self.activation, (second.spec, second.held))

    def is_ready(self) -> bool:
        """Whether both layers are in the order that the product of codes reads."""
        first, second = self.source.held, self.target.held
        return "tiles" in first and takes_codes(self.target.spec, second) and _device(first) == _device(second)


def fuse_chains(model: nn.Module) -> None:
    """Join every pair of flatten Linears that the family table calls a chain; calling it again changes nothing.

    A pair takes effect where both layers are prepared. The state dict stays what it is.
    """
    for block, chain in chains_of(model):
        _join(block, chain)


def fused_pairs(model: nn.Module) -> dict[str, FusedPair]:
    """The pairs of a model by the name of the module that calls them."""
    owners = ((name, hook) for name, module in model.named_modules() for hook in module._forward_pre_hooks.values())
    pairs = ((name, getattr(hook, "__self__", None)) for name, hook in owners)
    return {name: pair for name, pair in pairs if isinstance(pair, FusedPair)}


def _join(block: nn.Module, chain: Chain) -> None:
    paths = chain.source, chain.activation, chain.target
    source, between, target = map(block.get_submodule, paths)
    if isinstance(between, PassingActivation) or not (is_flatten(source) and is_flatten(target)):
        return
    activation = activation_name(between)
    if activation is None:
        return
    parent, _, source_name = chain.source.rpartition(".")
    names = source_name, chain.activation.rpartition(".")[2], chain.target.rpartition(".")[2]
    pair = FusedPair(names, source, PassingActivation(between), target, activation)
    caller = block.get_submodule(parent)
    caller.add_module(names[1], pair.between)
    caller.register_forward_pre_hook(pair.arm)
    caller.register_forward_hook(pair.disarm, always_call=True)


def _device(tensors: dict[str, Tensor]) -> torch.device:
    return tensors["tiles"].device
