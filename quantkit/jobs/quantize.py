"""The quantization job: check everything, quantize block by block, write the checkpoint."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quantkit
from quantkit.calibration.artifact import Calibration, check_model, load_calibration
from quantkit.checkpoint.config import CheckpointConfig, Prefix, bits_per_weight, config_to_json
from quantkit.checkpoint.names import stored_names, with_stored_names
from quantkit.checkpoint.write import folder_bytes, foreign, save_checkpoint, save_surroundings
from quantkit.errors import CalibrationError, ModelError, OutputError, RecipeError, StatsError, refusing
from quantkit.integrations.transformers import attach_config, check_readable
from quantkit.jobs.block_work import BlockWork
from quantkit.jobs.estimate import Estimate, estimate
from quantkit.jobs.prefix_pass import prefix_of
from quantkit.jobs.quantize_blocks import quantize_blocks
from quantkit.jobs.tune import planned_tuning, tuned_piece
from quantkit.methods import METHODS, LayerPlan, check_recipe, head_plan, plan_layers, weighs_by_loss
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.loading import first_device, is_quantized, open_stream, stored_dtype, stream_fingerprint
from quantkit.models.prefix import check_takes_prefix
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import activations_dtype
from quantkit.models.structure import output_head
from quantkit.models.unquantized import Unquantized, check_unquantized_weights, unquantized
from quantkit.progress import say
from quantkit.quantizers.rotation import placed_rotations
from quantkit.ranks import ALONE, Ranks
from quantkit.recipe import Recipe
from quantkit.runtime import int8_attention
from quantkit.storage.output import OutputFolder, output_folder
from quantkit.storage.resume import Workspace, shared_workspace, workspace
from quantkit.tuning.settings import TuneSettings

_LARGEST = torch.finfo(torch.float16).max  # scales and offsets are stored in fp16


@dataclass(frozen=True)
class QuantizeOptions:
    """How the work is done; none of it is in the recipe.

    device: where to compute, by default the first GPU, else the CPU. activations: fp32 or bf16, what hidden states are
    stored in between blocks.
    overwrite: whether an earlier checkpoint gives way. restart: whether what an earlier run left is dropped.
    ranks: the processes that share the work, each called with the same arguments but for its device.
    """

    device: str = field(default_factory=first_device)
    activations: str = "fp32"
    overwrite: bool = False
    restart: bool = False
    ranks: Ranks = ALONE


@dataclass(frozen=True)
class QuantizeResult:
    """What the job did: the folder, its size, bits per weight of the quantized layers, seconds of quantizing.

    report: what quantkit.json holds. unquantized: what stays in floating point.
    """

    folder: Path
    layers: int
    bits_per_weight: float
    bytes: int
    seconds: float
    report: Mapping[str, Any]
    unquantized: tuple[Unquantized, ...]


def quantize_model(
    model: str, recipe: Recipe, out: Path, *, calibration: Path | None, options: QuantizeOptions
) -> QuantizeResult | None:
    """Quantize a model by a recipe and write it to ``out``; everything is checked before the first layer.

    One decoder block is in memory at a time. Finished blocks stay beside ``out`` when the work is cut short, and the
    same call goes on from them. Of several ranks the first writes and returns the result, the others None.
    Raises QuantkitError: recipe, output folder, calibration and weights each with their own subclass.
    """
    check_recipe(recipe)
    with _opened(model, recipe, out, calibration, options) as (job, output, work):
        started = time.perf_counter()
        blocks = _block_work(job, options)
        config, report = _quantize(job, blocks, work)
        if output is None:
            return None
        document = {"quantkit": quantkit.__version__, "model": model, "recipe": _recipe_document(recipe), **report}
        loaded = job.stream.model.to(job.dtype)
        attach_config(loaded, config_to_json(config))

        def save(folder: Path) -> None:
            with refusing(f"output {out} cannot be written", OutputError):
                save_checkpoint(loaded, document, folder, work.tensors())

        if job.tuning is not None and job.tuning.epochs:
            document["tuning"] = tuned_piece(blocks, model, work, job.tuning, save)
        seconds = time.perf_counter() - started
        save(output.work)
        check_readable(output.work)
        output.publish()
    size, bits = folder_bytes(out), bits_per_weight(config)
    return QuantizeResult(out, len(job.plans), bits, size, seconds, document, job.unquantized)


@contextmanager
def _opened(
    model: str, recipe: Recipe, out: Path, calibration: Path | None, options: QuantizeOptions
) -> Iterator[tuple[Job, OutputFolder | None, Workspace]]:
    """The job, where its output is made, and its workspace; the first rank checks everything and has the output."""
    made: list[tuple[Job, OutputFolder]] = []

    @contextmanager
    def leading() -> Iterator[Workspace]:
        with output_folder(out, replace=options.overwrite, foreign=foreign, source=Path(model)) as output:
            job = open_job(model, recipe, calibration, options)
            _check_space(expect(job, options), output.work)
            identity = _identity(job, calibration, options)
            with refusing(f"output {out} cannot be written", OutputError):
                save_surroundings(job.stream.model, job.tokenizer, output.work)
            made.append((job, output))
            with workspace(output.place, identity, restart=options.restart) as work:
                yield work

    with shared_workspace(options.ranks, leading) as work:
        job, output = made[0] if made else (open_job(model, recipe, calibration, options), None)
        yield job, output, work


@dataclass(frozen=True)
class Job:
    """A model that is about to be quantized, checked as far as its shapes go.

    dtype: of what stays floating point. unquantized: what of that is worth a word. tuning: what follows, or None.
    """

    model: str
    recipe: Recipe
    stream: ModelStream
    tokenizer: Any
    plans: Mapping[str, LayerPlan]
    artifact: Calibration | None
    dtype: torch.dtype
    unquantized: tuple[Unquantized, ...]
    tuning: TuneSettings | None

    @property
    def prefix(self) -> Prefix | None:
        """What the checkpoint's texts will stand behind."""
        tokens = None if self.artifact is None else self.artifact.meta.prefix
        return prefix_of(self.stream.model, tokens or ())


def open_job(model: str, recipe: Recipe, calibration: Path | None, options: QuantizeOptions) -> Job:
    """Open the model and plan its layers; no weight is read. Raises QuantkitError as quantize_model does."""
    activations_dtype(options.activations)
    if is_quantized(model):
        raise ModelError(f"model {model} is quantized already; give the floating-point original")
    artifact = load_calibration(calibration) if calibration else None
    stream, tokenizer = open_stream(model, dtype=torch.float32, device=options.device)
    linears = block_linears(stream.model)
    plans = placed_rotations(stream.model, plan_layers(recipe, list(linears)))
    _check_calibration(plans, artifact, recipe)
    shapes = {name: linear_shape(linears[name]) for name in plans}
    tuning = planned_tuning(recipe, plans, shapes, artifact, stream, tokenizer)
    _check_attention(recipe, artifact, stream.model)
    _check_prefix(recipe, artifact, stream.model)
    plans |= _head_plans(recipe, stream.model)
    left = unquantized(stream.model, plans, recipe.keeps)
    check_unquantized_weights(left, recipe.name)
    _say_where_a_head_is_untied(stream.model, plans, stored_dtype(model))
    return Job(model, recipe, stream, tokenizer, plans, artifact, stored_dtype(model), tuple(left), tuning)


def _say_where_a_head_is_untied(model: Any, plans: Mapping[str, LayerPlan], dtype: torch.dtype) -> None:
    """One line: of a small model the files can become nearly as large as the original's."""
    weight = model.get_input_embeddings().weight
    rotated = [plan.settings for plan in plans.values() if getattr(plan.settings, "rotate", False)]
    if rotated and model.get_output_embeddings().weight is weight:
        more = f"{weight.numel() * dtype.itemsize / 1e6:.1f} MB more"
        instead = "; rotate_inputs in its place leaves them one" if hasattr(rotated[0], "rotate_inputs") else ""
        say(f"rotate: head and embedding become two weights, {more}{instead}")


def expect(job: Job, options: QuantizeOptions) -> Estimate:
    """What the job will write and take."""
    blocks = _block_work(job, options)
    stored = activations_dtype(options.activations).itemsize * blocks.models if blocks.streams else 0
    return estimate(job.stream, job.plans, job.artifact, job.dtype, stored, job.tuning, prefix=job.prefix)


def _check_space(need: Estimate, folder: Path) -> None:
    """Refuse a disk or a memory that cannot hold what the job takes."""
    free = shutil.disk_usage(folder).free
    if free < need.disk:
        raise OutputError(
            f"output in {folder.parent}: takes at least {need.disk / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there; "
            "choose a folder on another disk"
        )
    need.check_memory()


def _recipe_document(recipe: Recipe) -> dict[str, Any]:
    return {"name": recipe.name, **recipe.to_json()}


def _identity(job: Job, calibration: Path | None, options: QuantizeOptions) -> dict[str, Any]:
    """What the work is of. Every weight is read, and checked, on the way."""
    found = stream_fingerprint(job.stream, _check_weight)
    digest = None
    if job.artifact is not None and calibration is not None:
        check_model(job.artifact, job.stream.model, found)
        with calibration.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "version": quantkit.__version__,
        "model": found,
        "recipe": _recipe_document(job.recipe),
        "calibration": digest,
        "activations": options.activations,
        "device": job.stream.device.type,
    }


def _block_work(job: Job, options: QuantizeOptions) -> BlockWork:
    return BlockWork(
        job.stream,
        job.plans,
        job.artifact,
        job.dtype,
        activations_dtype(options.activations),
        attention=job.recipe.attention_bits is not None,
        ranks=options.ranks,
        prefix=job.prefix,
        tuning=job.tuning,
    )


def _quantize(job: Job, blocks: BlockWork, work: Workspace) -> tuple[CheckpointConfig, dict[str, Any]]:
    """Quantize every planned layer in place; (the config of the result, what quantkit.json says of it).

    Both name layers as the files do.
    """
    meta = {
        "quantizer": f"quantkit {quantkit.__version__}",
        "recipe": job.recipe.name,
        "calibration": job.artifact.meta.to_json() if job.artifact is not None else None,
    }
    done = quantize_blocks(blocks, work)
    ignore = [name for name, module in job.stream.model.named_modules() if isinstance(module, nn.Linear)]
    modules = () if blocks.prefix is None else blocks.prefix.modules
    names = stored_names(job.stream.model, [*done.stored, *ignore, *modules])
    config = CheckpointConfig(done.stored, tuple(ignore), meta, done.attention, blocks.prefix)
    config = with_stored_names(config, names)
    report = {
        "calibration": meta["calibration"],
        "transforms": done.transforms,
        "layers": {names[name]: measured for name, measured in done.layers.items()},
        "unquantized": [asdict(row) for row in job.unquantized],
        **({"tuned_blocks": done.tuned_blocks} if done.tuned_blocks else {}),
    }
    return config, report


def _check_calibration(plans: Mapping[str, LayerPlan], artifact: Calibration | None, recipe: Recipe) -> None:
    weighed = next((name for name, plan in plans.items() if weighs_by_loss(plan)), None)
    if artifact is not None:
        if weighed is not None and not artifact.saliency:
            raise CalibrationError(
                f"recipe {recipe.name}: hessian: end_loss needs a calibration with the gradients of {weighed}; "
                "set `saliency` to 4 there"
            )
        absent = [name for name in plans if name not in artifact.layers]
        if absent:
            raise CalibrationError(
                f"calibration: has no statistics for {absent[0]}; it was made for another model "
                f"({artifact.meta.model}) or by another version; calibrate again"
            )
        return
    for name, plan in plans.items():
        method = METHODS[plan.method]
        if method.needs_stats(plan.settings) or method.needs_hessian(plan.settings):
            raise CalibrationError(
                f"recipe {recipe.name}: method {plan.method} needs a calibration artifact for {name}; "
                "make one with 'quantkit calibrate' and pass it as `calibration`"
            )


def _head_plans(recipe: Recipe, model: nn.Module) -> dict[str, LayerPlan]:
    """The plan of the head by its name, where the recipe quantizes it."""
    if recipe.head_bits is None:
        return {}
    head = output_head(model)
    if head is None:
        raise RecipeError(
            f"recipe {recipe.name}: head_bits: {type(model).__name__} has no Linear that makes its logits"
        )
    return {head[0]: head_plan(recipe.head_bits)}


def _check_attention(recipe: Recipe, artifact: Calibration | None, model: nn.Module) -> None:
    if recipe.attention_bits is not None:
        int8_attention.check_supported(model)
        if artifact is None:
            raise CalibrationError(
                f"recipe {recipe.name}: attention_bits needs a calibration artifact for the ranges of Q, K and V; "
                "make one with 'quantkit calibrate' and pass it as `calibration`"
            )


def _check_prefix(recipe: Recipe, artifact: Calibration | None, model: nn.Module) -> None:
    """Refuse a recipe and a calibration of which one has a prefix: what lies behind one has other ranges."""
    tokens = None if artifact is None else artifact.meta.prefix
    if recipe.prefix is not None:
        check_takes_prefix(model)
        if tokens is None:
            raise CalibrationError(
                f"recipe {recipe.name}: prefix needs a calibration that was collected behind one; set `prefix` there"
            )
        if not tokens:
            say("prefix: no token of the calibration sticks out by much, so the checkpoint stores none")
    elif tokens:
        raise CalibrationError(
            f"calibration: was collected behind a prefix of {len(tokens)} tokens, which recipe {recipe.name} does not "
            "store; set prefix=auto, or calibrate without"
        )


def _check_weight(name: str, weight: Tensor) -> None:
    peak = _largest_magnitude(weight) if weight.numel() else 0.0
    if not peak <= _LARGEST:  # also true of NaN
        what = f"|w| up to {peak:.3g}, beyond fp16" if peak > _LARGEST and peak != float("inf") else "NaN or Inf"
        raise StatsError(f"{name}: its weights hold {what}; the checkpoint is damaged or diverged")


def _largest_magnitude(values: Tensor) -> float:
    """max |x|, NaN where there is one; abs() would hold a copy of the largest matrix, the embedding."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low, high).item()
