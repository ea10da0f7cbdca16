"""The quantization job: load, check everything, quantize layer by layer, write the checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantkit
from quantkit.calibration.artifact import Calibration, check_model, load_calibration
from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, bits_per_weight, config_to_json
from quantkit.checkpoint.names import stored_names, with_stored_names
from quantkit.checkpoint.write import folder_bytes, foreign, save_checkpoint, save_surroundings
from quantkit.errors import CalibrationError, ModelError, OutputError, StatsError, refusing
from quantkit.integrations.transformers import attach_config, check_readable
from quantkit.methods import METHODS, LayerPlan, check_recipe, plan_layers
from quantkit.models.experts import expert_linears, separate_experts
from quantkit.models.families import block_linears, decoder_blocks, linear_bias, linear_weight
from quantkit.models.loading import is_quantized, load_model, stored_dtype
from quantkit.models.streaming import BlockInputs, Features, advance, block_hessians, capture_inputs
from quantkit.models.unquantized import Unquantized, check_unquantized_weights, unquantized
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.progress import track
from quantkit.quantizers.base import LayerInput
from quantkit.recipe import Recipe
from quantkit.runtime import int8_attention
from quantkit.stats import LayerStats
from quantkit.storage.output import output_folder

_ATTENTION_WINDOWS = 8  # enough for the largest magnitudes; each costs a pass of the whole model
_LARGEST = torch.finfo(torch.float16).max  # scales and offsets are stored in fp16


@dataclass(frozen=True)
class QuantizeResult:
    """What the job did: the folder, its size, bits per weight of the quantized layers, seconds of quantizing.

    report: of every layer, by its name in the files. unquantized: what stays in floating point.
    """

    folder: Path
    layers: int
    bits_per_weight: float
    bytes: int
    seconds: float
    report: Mapping[str, Any]
    unquantized: tuple[Unquantized, ...]


def quantize_model(
    model: str, recipe: Recipe, out: Path, *, calibration: Path | None, device: str, overwrite: bool
) -> QuantizeResult:
    """Quantize a model by a recipe and write it to ``out``; everything is checked before the first layer.

    Raises QuantkitError: recipe, output folder, calibration and weights each with their own subclass.
    """
    check_recipe(recipe)
    with output_folder(out, replace=overwrite, foreign=foreign, source=Path(model)) as output:
        if is_quantized(model):
            raise ModelError(f"model {model} is quantized already; give the floating-point original")
        artifact = load_calibration(calibration) if calibration else None
        loaded, tokenizer = load_model(model, dtype=torch.float32, device=device)
        separate_experts(loaded)
        plans = plan_layers(recipe, list(block_linears(loaded)))
        _check_calibration(plans, artifact, loaded, recipe)
        _check_attention(recipe, artifact, loaded)
        left = unquantized(loaded, plans, recipe.keeps)
        check_unquantized_weights(left, recipe.name)
        _check_weights(loaded)
        _check_space(loaded, plans, stored_dtype(model), output.work)
        with refusing(f"output {out} cannot be written", OutputError):
            save_surroundings(loaded, tokenizer, output.work)
        started = time.perf_counter()
        config, report = _quantize(loaded, plans, recipe, artifact)
        report["unquantized"] = [asdict(row) for row in left]
        seconds = time.perf_counter() - started
        loaded.to("cpu", stored_dtype(model))
        names = stored_names(loaded, [*config.layers, *config.ignore])
        report["layers"] = {names[name]: measured for name, measured in report["layers"].items()}
        attach_config(loaded, config_to_json(with_stored_names(config, names)))
        recipe_document = {"name": recipe.name, **recipe.to_json()}
        document = {"quantkit": quantkit.__version__, "model": model, "recipe": recipe_document, **report}
        with refusing(f"output {out} cannot be written", OutputError):
            save_checkpoint(loaded, document, output.work)
        check_readable(output.work)
        output.publish()
    size, bits = folder_bytes(out), bits_per_weight(config)
    return QuantizeResult(out, len(plans), bits, size, seconds, report["layers"], tuple(left))


def _quantize(
    model: Any, plans: Mapping[str, LayerPlan], recipe: Recipe, artifact: Calibration | None
) -> tuple[CheckpointConfig, dict[str, Any]]:
    """Quantize every planned layer in place; (the config of the result, what quantkit.json says of it)."""
    transforms, folded, changed = _transform(model, plans, artifact)
    if artifact is not None:
        artifact = replace(artifact, layers=artifact.layers | changed)
    layers = _quantize_layers(model, plans, artifact, folded)
    attention = {}
    if recipe.attention_bits is not None and artifact is not None:
        attention = int8_attention.calibrate(model, artifact.windows[:_ATTENTION_WINDOWS])
    config = replace(_config(model, plans, recipe, artifact), attention=attention)
    return config, {"calibration": config.meta["calibration"], "transforms": transforms, "layers": layers}


def _check_calibration(
    plans: Mapping[str, LayerPlan], artifact: Calibration | None, model: nn.Module, recipe: Recipe
) -> None:
    if artifact is not None:
        check_model(artifact, model)
        absent = [name for name in plans if name not in artifact.layers]
        if absent:
            raise CalibrationError(f"the calibration artifact has no statistics for {absent[0]}; calibrate again")
        return
    for name, plan in plans.items():
        method = METHODS[plan.method]
        if method.needs_stats(plan.settings) or method.needs_hessian(plan.settings):
            raise CalibrationError(
                f"recipe {recipe.name}: method {plan.method} needs a calibration artifact for {name}; "
                "make one with 'quantkit calibrate' and pass it as `calibration`"
            )


def _check_attention(recipe: Recipe, artifact: Calibration | None, model: nn.Module) -> None:
    if recipe.attention_bits is not None:
        int8_attention.check_supported(model)
        if artifact is None:
            raise CalibrationError(
                f"recipe {recipe.name}: attention_bits needs a calibration artifact for the ranges of Q, K and V; "
                "make one with 'quantkit calibrate' and pass it as `calibration`"
            )


def _check_weights(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        peak = _largest_magnitude(parameter.detach()) if parameter.numel() else 0.0
        if not peak <= _LARGEST:  # also true of NaN
            what = f"|w| up to {peak:.3g}, beyond fp16" if peak > _LARGEST and peak != float("inf") else "NaN or Inf"
            raise StatsError(f"{name}: its weights hold {what}; the checkpoint is damaged or diverged")


def _check_space(model: nn.Module, plans: Mapping[str, LayerPlan], dtype: torch.dtype, folder: Path) -> None:
    """Refuse a disk that cannot hold even the unquantized tensors and one bit of every quantized weight."""
    quantized = {f"{name}.weight" for name in plans}
    sizes = {name: tensor.numel() for name, tensor in model.named_parameters()}  # tied ones once
    least = sum(size // 8 if name in quantized else size * dtype.itemsize for name, size in sizes.items())
    free = shutil.disk_usage(folder).free
    if free < least:
        raise OutputError(
            f"output in {folder.parent}: takes at least {least / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there; "
            "choose a folder on another disk"
        )


def _largest_magnitude(values: Tensor) -> float:
    """max |x|, NaN where there is one; abs() would hold a copy of the largest matrix, the embedding."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).item()


def _transform(
    model: nn.Module, plans: Mapping[str, LayerPlan], artifact: Calibration | None
) -> tuple[dict[str, Mapping[str, Any]], dict[str, Tensor], dict[str, LayerStats]]:
    """Run each method's function-preserving edit of the whole model, once, over the layers that use the method.

    Returns each method's report and, by layer name, the scales that were folded and the statistics that changed.
    """
    report: dict[str, Mapping[str, Any]] = {}
    folded: dict[str, Tensor] = {}
    changed: dict[str, LayerStats] = {}
    for name in sorted({plan.method for plan in plans.values()}):
        transform = METHODS[name].transform
        if transform is not None:
            own = {layer: plan for layer, plan in plans.items() if plan.method == name}
            done = transform(model, own, artifact)
            report[name] = done.report
            folded |= done.folded_scales
            changed |= done.stats
    return report, folded, changed


def _quantize_layers(
    model: nn.Module, plans: Mapping[str, LayerPlan], artifact: Calibration | None, folded: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Quantize and replace every planned layer, block by block; the report of each by name.

    Where a block needs Hessians, they are of the inputs that the blocks before it, already quantized, produce.
    """
    streamed = any(METHODS[plan.method].needs_hessian(plan.settings) for plan in plans.values())
    inputs = capture_inputs(model, artifact.windows) if streamed and artifact is not None else None
    report: dict[str, dict[str, Any]] = {}
    blocks, experts = decoder_blocks(model), expert_linears(model)
    bar = iter(track(plans, "quantizing", total=len(plans)))
    for index, (prefix, block) in enumerate(blocks):
        own = {name: plan for name, plan in plans.items() if name.startswith(f"{prefix}.")}
        layers = {name: _layer_input(model, name, artifact, folded.get(name)) for name in own}
        if inputs is not None:
            layers |= _with_hessians(model, block, index, inputs, own, layers)
        for name, plan in own.items():
            next(bar)
            report[name] = _quantize_layer(model, plan, layers.pop(name))
            if name in experts and artifact is not None:
                report[name]["tokens"] = artifact.layers[name].tokens
        if inputs is not None:
            inputs = advance(block, inputs, index)
    next(bar, None)
    return report


def _layer_input(model: nn.Module, name: str, artifact: Calibration | None, folded: Tensor | None) -> LayerInput:
    weight = linear_weight(_module(model, name)).detach().float().contiguous()
    stats = artifact.stats_of(name) if artifact is not None else None
    return LayerInput(name, weight, stats, folded_scale=folded)


def _with_hessians(
    model: nn.Module,
    block: nn.Module,
    index: int,
    inputs: BlockInputs,
    plans: Mapping[str, LayerPlan],
    layers: Mapping[str, LayerInput],
) -> dict[str, LayerInput]:
    """The layers of one block whose methods ask for a Hessian, each with it."""
    wanted: dict[str, nn.Module] = {}
    features: dict[str, Features] = {}
    for name, plan in plans.items():
        method = METHODS[plan.method]
        if method.needs_hessian(plan.settings):
            wanted[name] = _module(model, name)
            if method.hessian_features is not None:
                features[name] = method.hessian_features(layers[name], plan.settings)
    if not wanted:
        return {}
    hessians = block_hessians(block, inputs, index, wanted, features, expert_linears(model))
    return {name: replace(layers[name], hessian=hessian) for name, hessian in hessians.items()}


def _quantize_layer(model: nn.Module, plan: LayerPlan, layer: LayerInput) -> dict[str, Any]:
    module = _module(model, layer.name)
    packed = METHODS[plan.method].quantize(layer, plan.settings)
    bias = linear_bias(module)
    model.set_submodule(layer.name, QuantizedLinear.from_packed(packed, bias, module.weight.dtype))
    return {"method": plan.method, **packed.report}


def _config(
    model: nn.Module, plans: Mapping[str, LayerPlan], recipe: Recipe, artifact: Calibration | None
) -> CheckpointConfig:
    ignore = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    meta = {
        "quantizer": f"quantkit {quantkit.__version__}",
        "recipe": recipe.name,
        "calibration": artifact.meta.to_json() if artifact is not None else None,
    }
    modules = {name: _module(model, name) for name in plans}
    layers = {name: StoredLayer(module.spec, module.shape) for name, module in modules.items()}
    return CheckpointConfig(layers, tuple(ignore), meta)


def _module(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)
