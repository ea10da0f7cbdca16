"""What the shipped recipes are: bits per weight, what they need, and the advice at the head of each file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from quantkit.assets import recipe_names, recipe_path
from quantkit.formats.base import Shape
from quantkit.formats.table import stored_bytes
from quantkit.methods import METHODS, plan_layers
from quantkit.recipe import load_recipe

NOMINAL_SHAPE: Shape = (4096, 4096)
_LAYER = "layer"  # the name of a Linear that no recipe makes an exception for
NOTHING, STATISTICS, HESSIAN = "nothing", "calibration", "calibration (Hessian)"


@dataclass(frozen=True)
class RecipeSummary:
    """One shipped recipe.

    bits_per_weight: least and most of a Linear of NOMINAL_SHAPE, codes, scales and offsets counted; they differ where
        the weights and the text decide. needs: what quantizing asks for. advice: the comment at the head of the file.
    """

    name: str
    method: str
    bits_per_weight: tuple[float, float]
    needs: str
    advice: str

    def to_json(self) -> Mapping[str, Any]:
        """All of it as a JSON document."""
        return asdict(self)


def shipped_recipes() -> list[RecipeSummary]:
    """Every shipped recipe, by name."""
    return [_summary(name) for name in recipe_names()]


def _summary(name: str) -> RecipeSummary:
    recipe = load_recipe(name)
    plan = plan_layers(recipe, [_LAYER])[_LAYER]
    method = METHODS[plan.method]
    weights = NOMINAL_SHAPE[0] * NOMINAL_SHAPE[1]
    specs = method.stored_specs(plan.settings, NOMINAL_SHAPE)
    bits = [8 * stored_bytes(spec, NOMINAL_SHAPE) / weights for spec in specs]
    needs = NOTHING
    if method.needs_hessian(plan.settings):
        needs = HESSIAN
    elif method.needs_stats(plan.settings) or recipe.attention_bits is not None or recipe.tune is not None:
        needs = STATISTICS
    return RecipeSummary(name, plan.method, (min(bits), max(bits)), needs, _head_comment(name))


def _head_comment(name: str) -> str:
    lines = recipe_path(name).read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ").rstrip() for line in takewhile(lambda line: line.startswith("#"), lines))
