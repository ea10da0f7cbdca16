"""What a recipe leaves in floating point: named with its share of the model, and refused where nobody asked for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from quantkit.errors import RecipeError
from quantkit.models.structure import language_model

LEAST_ELEMENTS = 1_000_000  # of a weight, and
LEAST_SHARE = 0.01  # of the model: what is below either is not worth a word
_MORE_POSITIONS = 8  # rows that a table of positions may have beyond the model's (OPT's has two)


@dataclass(frozen=True)
class Unquantized:
    """Weights that stay in floating point; numbers in a name are replaced by * where several differ in them alone.

    share: of all the model's elements. reason: why they stay; None where neither recipe nor habit says so.
    """

    name: str
    elements: int
    share: float
    reason: str | None


def unquantized(model: Any, quantized: Collection[str], keeps: Callable[[str], bool]) -> list[Unquantized]:
    """The weights of more than a million elements that, with their like, are at least a hundredth of the model.

    quantized: names of the Linears that are not left. keeps: whether the recipe names a module or parameter. Input
    embeddings, tables of positions and the head stay by habit, and so does all that is beside the language model.
    """
    weights, reasons = {f"{name}.weight" for name in quantized}, _habits(model)
    beside, total = _beside(model), 0
    found: dict[tuple[str, str | None], int] = {}
    for name, parameter in model.named_parameters():  # tied ones once
        total += parameter.numel()
        owner = name.rpartition(".")[0]
        tower = next((path for path in beside if name.startswith(f"{path}.")), None)
        if name in weights or (tower is None and parameter.numel() <= LEAST_ELEMENTS):
            continue
        kept = keeps(name) or keeps(owner) or (tower is not None and keeps(tower))
        reason = "kept by the recipe" if kept else reasons.get(id(parameter))
        if reason is None and tower is not None:
            reason = "beside the language model"
        key = tower or re.sub(r"\.\d+(?=\.|$)", ".*", name.removesuffix(".weight")), reason
        found[key] = found.get(key, 0) + parameter.numel()
    left = [Unquantized(name, count, count / total, reason) for (name, reason), count in found.items()]
    return [entry for entry in left if entry.elements > LEAST_ELEMENTS and entry.share >= LEAST_SHARE]


def check_unquantized_weights(left: Collection[Unquantized], recipe: str) -> None:
    """Raise RecipeError for a weight that nobody asked to leave in floating point."""
    silent = [entry for entry in left if entry.reason is None]
    if silent:
        worst = max(silent, key=lambda entry: entry.share)
        others = f", and {len(silent) - 1} more" if len(silent) > 1 else ""
        raise RecipeError(
            f"recipe {recipe}: {worst.name} would stay in floating point, {worst.share:.1%} of the model{others}; only "
            f"Linears of the decoder blocks can be quantized; if that is meant, add {worst.name} to 'keep'"
        )


def _habits(model: Any) -> dict[int, str]:
    """Parameter -> why it stays without a word in the recipe."""
    habits = {}
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for module in model.modules():
        more = module.num_embeddings - positions if isinstance(module, nn.Embedding) and positions else -1
        if 0 <= more <= _MORE_POSITIONS:
            habits[id(module.weight)] = "positions"
    for reason, module in (("head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        if module is not None:
            habits[id(module.weight)] = reason
    return habits


def _beside(model: nn.Module) -> list[str]:
    """The outermost modules that hold nothing of the language model, such as a vision tower."""
    language, _ = language_model(model)
    if not language:
        return []
    path = language.split(".")
    beside = []
    for depth in range(len(path)):
        above = ".".join(path[:depth])
        for name, _ in model.get_submodule(above).named_children():
            if name != path[depth]:
                beside.append(f"{above}.{name}" if above else name)
    return beside
