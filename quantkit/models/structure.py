"""What can be told of a model from its modules alone, whatever its family."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers.pytorch_utils import Conv1D

from quantkit.errors import ModelError

LINEAR_TYPES = (nn.Linear, Conv1D)


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


def refuse_experts(name: str, module: nn.Module) -> None:
    """Raise ModelError for a module with parameters of three or more dimensions of its own."""
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim >= 3:
            raise ModelError(
                f"{name}.{parameter_name}: {parameter.ndim}-D weight {tuple(parameter.shape)} (fused experts or a "
                "convolution) is not supported; only models whose blocks are built of Linears can be quantized"
            )
