"""A model that shares all its tensors with another and runs some of its modules in another way.

Nothing of the first model is replaced, so it keeps its own code, and several twins of it may run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from torch import nn

Forward = Callable[..., Any]


def twin_of(module: nn.Module, forwards: Mapping[nn.Module, Forward]) -> nn.Module:
    """A copy of the module in which those of its modules that ``forwards`` names run its functions.

    Modules that neither change nor hold one that does are the same objects in both. Hooks of a copied module run for
    its copy, too.
    """
    if module in forwards:
        changed = copy(module)
        changed.forward = forwards[module]
        return changed
    children = {name: None if child is None else twin_of(child, forwards) for name, child in module._modules.items()}
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    holder = copy(module)
    holder._modules = children
    return holder


def is_watched(module: nn.Module) -> bool:
    """Whether hooks, or a forward that stands in for the class's (accelerate), expect what its own code gives it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def holds_watched(module: nn.Module) -> bool:
    """Whether a module inside this one is watched."""
    return any(map(is_watched, list(module.modules())[1:]))
