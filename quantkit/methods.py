"""The METHODS table: one row per quantization method, binding its settings, its quantizer and its needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight
from quantkit.quantizers import bcq, rounding
from quantkit.quantizers.base import LayerInput
from quantkit.recipe import Recipe, nearest


def _never(settings: Any) -> bool:
    return False


@dataclass(frozen=True)
class LayerPlan:
    """Everything decided about one Linear before its weight is touched: a row of METHODS and its settings."""

    method: str
    settings: Any


@dataclass(frozen=True)
class Method:
    """One row of METHODS.

    settings: frozen dataclass of the recipe settings; its __post_init__ raises RecipeError on impossible values.
    quantize: (LayerInput, settings) -> PackedWeight.
    needs_stats: settings -> whether the calibration artifact's statistics are required.
    needs_hessian: settings -> whether E[x x^T], streamed through the already quantized blocks, is required.
    transform: function-preserving edit of the fp model before any layer is quantized (smoothing folded into
        norms, rotation): (model, plans by layer name, calibration or None) -> report for quantkit.json.
    """

    settings: type[Any]
    quantize: Callable[[LayerInput, Any], PackedWeight]
    needs_stats: Callable[[Any], bool] = _never
    needs_hessian: Callable[[Any], bool] = _never
    transform: Callable[[nn.Module, Mapping[str, LayerPlan], Any], dict[str, Any]] | None = None


METHODS: dict[str, Method] = {
    "bcq": Method(bcq.BcqSettings, bcq.quantize),
    "rtn": Method(rounding.RtnSettings, rounding.quantize),
}


def plan_layers(recipe: Recipe, layers: list[str]) -> dict[str, LayerPlan]:
    """The plan of every layer the recipe does not keep in floating point, by module name.

    Raises RecipeError for an unknown method or setting, an impossible value, or a glob that matches no layer.
    """
    for rule in recipe.layers:
        if not any(recipe_matches(rule.match, layer) for layer in layers):
            raise RecipeError(f"recipe {recipe.name}: layers entry {rule.match!r} matches no layer of this model")
    plans = {}
    for layer in layers:
        if not recipe.keeps(layer):
            method, settings = recipe.settings_for(layer)
            plans[layer] = LayerPlan(method, _settings(recipe.name, method, settings))
    if not plans:
        raise RecipeError(f"recipe {recipe.name}: 'keep' leaves no layer to quantize")
    return plans


def check_recipe(recipe: Recipe) -> None:
    """Check method names and settings without a model, so mistakes show before anything is loaded.

    Raises RecipeError.
    """
    _settings(recipe.name, recipe.method, dict(recipe.settings))
    for rule in recipe.layers:
        method, settings = recipe.settings_for(rule.match)
        _settings(recipe.name, method, settings)


def recipe_matches(glob: str, layer: str) -> bool:
    """Whether a recipe's glob names this layer."""
    from fnmatch import fnmatchcase

    return fnmatchcase(layer, glob)


def _settings(recipe: str, method: str, values: dict[str, Any]) -> Any:
    if method not in METHODS:
        raise RecipeError(f"recipe {recipe}: unknown method {method!r}; {nearest(method, METHODS)}")
    cls = METHODS[method].settings
    known = {field.name: field.type for field in fields(cls)}
    for key in values:
        if key not in known:
            raise RecipeError(f"recipe {recipe}: method {method} has no setting {key!r}; {nearest(key, known)}")
    try:
        return cls(**values)
    except RecipeError as error:
        raise RecipeError(f"recipe {recipe}: {error}") from error
    except TypeError as error:
        raise RecipeError(f"recipe {recipe}: method {method}: {error}") from error
