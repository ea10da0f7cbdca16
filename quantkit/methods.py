"""The METHODS table: one row per quantization method, binding its settings, its quantizer and its needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args, get_type_hints

from torch import Tensor, nn

from quantkit.errors import RecipeError
from quantkit.formats.base import PackedWeight, Shape
from quantkit.quantizers import bipolar, hqq, rotation, rounding
from quantkit.quantizers.base import END_LOSS, LayerInput, Transformed
from quantkit.quantizers.bcq import quantizer as bcq
from quantkit.quantizers.flatten import quantizer as flatten
from quantkit.quantizers.flatten.settings import FlattenSettings
from quantkit.quantizers.flatten.transform import rotate_and_smooth
from quantkit.quantizers.trellis import quantizer as trellis
from quantkit.recipe import Recipe, nearest

_HEAD_METHOD, _HEAD_GROUP = "rtn", 128


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
    stored_specs: (settings, shape) -> the spec that a weight [N, K] is stored as; the smallest and the largest where
        that depends on the data.
    needs_stats: settings -> whether the calibration artifact's statistics are required.
    needs_hessian: settings -> whether E[x x^T], streamed through the already quantized blocks, is required.
    transform: function-preserving edit of the fp model before any layer is quantized (smoothing folded into
        norms, rotation): (model, plans by layer name, calibration or None) -> Transformed. It is called for what is
        outside the decoder blocks and then for each block, and edits what is not on the meta device.
    hessian_features: (LayerInput without Hessian, settings) -> what the Hessian is taken of, a function of the
        layer's input x [M, K] giving [M, C]; None: x itself.
    independent_rows: whether each row of a weight is quantized without regard to the others.
    """

    settings: type[Any]
    quantize: Callable[[LayerInput, Any], PackedWeight]
    stored_specs: Callable[[Any, Shape], tuple[Any, ...]]
    needs_stats: Callable[[Any], bool] = _never
    needs_hessian: Callable[[Any], bool] = _never
    transform: Callable[[nn.Module, Mapping[str, LayerPlan], Any], Transformed] | None = None
    hessian_features: Callable[[LayerInput, Any], Callable[[Tensor], Tensor]] | None = None
    independent_rows: bool = False


def _always(settings: Any) -> bool:
    return True


METHODS: dict[str, Method] = {
    "bcq": Method(
        bcq.BcqSettings,
        bcq.quantize,
        bcq.stored_specs,
        needs_hessian=bcq.needs_hessian,
        transform=rotation.fold_rotation,
        independent_rows=True,
    ),
    "bipolar": Method(
        bipolar.BipolarSettings,
        bipolar.quantize,
        bipolar.stored_specs,
        needs_stats=bipolar.needs_stats,
        needs_hessian=bipolar.needs_hessian,
        transform=rotation.fold_rotation,
    ),
    "flatten": Method(
        FlattenSettings,
        flatten.quantize,
        flatten.stored_specs,
        needs_stats=_always,
        needs_hessian=flatten.needs_hessian,
        transform=rotate_and_smooth,
        hessian_features=flatten.flattened_activations,
    ),
    "hqq": Method(hqq.HqqSettings, hqq.quantize, hqq.stored_specs),
    "rtn": Method(
        rounding.RtnSettings,
        rounding.quantize,
        rounding.stored_specs,
        needs_hessian=rounding.needs_hessian,
        transform=rotation.fold_rotation,
        independent_rows=True,
    ),
    "trellis": Method(
        trellis.TrellisSettings,
        trellis.quantize,
        trellis.stored_specs,
        needs_hessian=trellis.needs_hessian,
        transform=rotation.fold_rotation,
    ),
}


def plan_layers(recipe: Recipe, layers: list[str]) -> dict[str, LayerPlan]:
    """The plan of every layer the recipe does not keep in floating point, by module name.

    Raises RecipeError for an unknown method or setting, an impossible value, a glob that matches no layer, or two
    methods that rotate.
    """
    for rule in recipe.layers:
        if not any(fnmatchcase(layer, rule.match) for layer in layers):
            raise RecipeError(f"recipe {recipe.name}: layers entry {rule.match!r} matches no layer of this model")
    plans = {}
    for layer in layers:
        if not recipe.keeps(layer):
            method, settings = recipe.settings_for(layer)
            plans[layer] = LayerPlan(method, _settings(recipe.name, method, settings))
    if not plans:
        raise RecipeError(f"recipe {recipe.name}: 'keep' leaves no layer to quantize")
    rotating = sorted({plan.method for plan in plans.values() if getattr(plan.settings, "rotate", False)})
    if len(rotating) > 1:
        raise RecipeError(f"recipe {recipe.name}: {' and '.join(rotating)} both rotate; the residual stream turns once")
    return plans


def stored_specs(name: str, plan: LayerPlan, shape: Shape) -> tuple[Any, ...]:
    """What a Linear [N, K] may be stored as by its plan. Raises RecipeError, naming it, for a shape that cannot be."""
    try:
        return METHODS[plan.method].stored_specs(plan.settings, shape)
    except RecipeError as error:
        raise RecipeError(f"{name}: {error}") from error


def weighs_by_loss(plan: LayerPlan) -> bool:
    """Whether a layer's Hessian is to be weighed by the gradients of the end loss."""
    return getattr(plan.settings, "hessian", None) == END_LOSS


def head_plan(bits: int) -> LayerPlan:
    """The plan of a language-model head in so many bits, whatever the recipe's method.

    Round-to-nearest, as nothing is calibrated behind the last norm. Raises RecipeError for impossible bits.
    """
    return LayerPlan(_HEAD_METHOD, METHODS[_HEAD_METHOD].settings(weight_bits=bits, group_size=_HEAD_GROUP))


def head_spec(bits: int) -> Any:
    """What head_plan stores."""
    plan = head_plan(bits)
    return METHODS[plan.method].stored_specs(plan.settings, (1, 1))[0]


def check_recipe(recipe: Recipe) -> None:
    """Check method names and settings without a model, so mistakes show before anything is loaded.

    Raises RecipeError.
    """
    _settings(recipe.name, recipe.method, dict(recipe.settings))
    for rule in recipe.layers:
        _settings(recipe.name, *recipe.apply(rule))


def _settings(recipe: str, method: str, values: dict[str, Any]) -> Any:
    if method not in METHODS:
        raise RecipeError(f"recipe {recipe}: unknown method {method!r}; {nearest(method, METHODS)}")
    cls = METHODS[method].settings
    known = get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            raise RecipeError(f"recipe {recipe}: method {method} has no setting {key!r}; {nearest(key, known)}")
        if not _fits(value, known[key]):
            wanted = getattr(known[key], "__name__", str(known[key]))
            raise RecipeError(f"recipe {recipe}: {key} is {value!r}; method {method} expects {wanted}")
    try:
        return cls(**values)
    except RecipeError as error:
        raise RecipeError(f"recipe {recipe}: {error}") from error


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a YAML value is of the annotated type; an integer counts as a float, a bool or NaN not as a number."""
    options = get_args(wanted) or (wanted,)
    if isinstance(value, bool):
        return bool in options
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return isinstance(value, options) or (isinstance(value, int) and float in options)
