"""What can be told of a model from its modules alone, whatever its family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn
from transformers.pytorch_utils import Conv1D

LINEAR_TYPES = (nn.Linear, Conv1D)
# Mamba's code multiplies by the weight of dt_proj itself; Gemma-3n's AltUp mixes four copies of a token by the others.
LEFT_ALONE = ("dt_proj", "modality_router", "prediction_coefs", "correction_coefs")
# Names of the Linears of a gated FFN, of an expert too: those that read its input, and the one that ends it.
_GATED_FFNS = ((("gate_proj", "up_proj"), "down_proj"), (("gate_up_proj",), "down_proj"), (("w1", "w3"), "w2"))
_LINEAR_FORWARDS = tuple(kind.forward for kind in LINEAR_TYPES)


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module of that name, or None."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def language_model(model: nn.Module) -> tuple[str, nn.Module]:
    """(name, module) of what decodes text in a model that may see and hear as well; the whole of other models."""
    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    name = next((name for name, module in model.named_modules() if module is decoder), None)
    return ("", model) if name is None else (name, decoder)


def output_head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """(name, module) of the Linear that makes the logits; None where the model has none."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    found = next((name for name, module in model.named_modules() if module is head), None)
    return None if found is None or head is None or not is_linear(head) else (found, head)


def embedding_matrices(model: Any) -> dict[str, nn.Parameter]:
    """By name, what embeds tokens and, where it is in floating point, the head's weight; one that is both, once."""
    weights = [getattr(m, "weight", None) for m in (model.get_input_embeddings(), model.get_output_embeddings())]
    found = {id(weight) for weight in weights if isinstance(weight, nn.Parameter) and weight.is_floating_point()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in found}


def untie_head(model: Any) -> None:
    """Let the head and the embedding be two weights from now on, also in the config; nothing is copied."""
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}  # what save_pretrained leaves out


def gated_outputs(model: nn.Module) -> set[str]:
    """Names of the Linears that read the product of a gate and of what it lets through: the last of a gated FFN."""
    found = set()
    for name, module in model.named_modules():
        linears = {own for own, child in module.named_children() if is_linear(child)}
        found |= {f"{name}.{last}" for first, last in _GATED_FFNS if linears.issuperset((*first, last))}
    return found


def model_body(model: nn.Module) -> nn.Module:
    """The model without its language-model head: enough where only the blocks matter."""
    body = getattr(model, "base_model", model)
    assert isinstance(body, nn.Module)
    return body


def block_stacks(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    """(name, list) of ModuleLists whose elements are alike, composite, and hold Linears.

    Elements are alike where they are of one class, or all blocks to transformers: those of hybrids take turns.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        alike = len({type(block) for block in module}) == 1
        if not alike and not all(map(_is_block, module)):
            continue
        if isinstance(module[0], LINEAR_TYPES):
            continue
        # In any of them: the first ones may have been quantized already.
        if any(_multiplies(child) for block in module for child in block.modules()):
            yield name, module


def _multiplies(module: nn.Module) -> bool:
    """Whether the module is a Linear, or stands for one and says its sizes, as quantized ones do."""
    return isinstance(module, LINEAR_TYPES) or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def _is_block(module: nn.Module) -> bool:
    # By name: transformers imports this module while it is only half imported itself.
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the module computes x W^T + bias: a subclass may be called a Linear and compute something else."""
    return isinstance(module, LINEAR_TYPES) and type(module).forward in _LINEAR_FORWARDS
