"""What can be told of a model from its modules alone, whatever its family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn
from transformers.pytorch_utils import Conv1D

LINEAR_TYPES = (nn.Linear, Conv1D)
_LINEAR_FORWARDS = tuple(kind.forward for kind in LINEAR_TYPES)


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module of that name, or None."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def block_stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """(name, list) of ModuleLists whose elements are of one class, composite, and hold Linears."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len({type(block) for block in module}) != 1:
            continue
        if isinstance(module[0], LINEAR_TYPES):
            continue
        if any(isinstance(child, LINEAR_TYPES) for child in module[0].modules()):
            yield name, module


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module computes x W^T + bias: a subclass may be called a Linear and compute something else."""
    return isinstance(module, LINEAR_TYPES) and type(module).forward in _LINEAR_FORWARDS
