"""The tuning that a recipe asks for after quantizing: a further piece of the work, over the tensors of the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.artifact import Calibration, TextSource
from quantkit.calibration.drawing import WRITTEN, digest, mixed
from quantkit.checkpoint.write import stored_tensors
from quantkit.cuda.launch import check_kernels
from quantkit.errors import CalibrationError, RecipeError
from quantkit.formats.base import Shape
from quantkit.formats.bcq import BcqSpec
from quantkit.integrations.transformers import load_checkpoint
from quantkit.jobs.block_work import BlockWork, Done
from quantkit.jobs.quantize_blocks import transform_part
from quantkit.methods import LayerPlan, stored_specs
from quantkit.models.loading import load_model
from quantkit.models.stream import ModelStream, in_memory_stream
from quantkit.models.structure import embedding_matrices
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import Recipe
from quantkit.runtime.writing import check_writes, write_windows
from quantkit.storage.resume import Workspace
from quantkit.tuning.install import TUNABLE
from quantkit.tuning.settings import TuneSettings, tune_settings
from quantkit.tuning.whole_model import tune_model

_TUNING = "tuning"
_WRITING_SEED = 1 << 20  # added to ``seed``, so that the model does not write again what it wrote for `calibrate`


def planned_tuning(
    recipe: Recipe,
    plans: Mapping[str, LayerPlan],
    shapes: Mapping[str, Shape],
    artifact: Calibration | None,
    stream: ModelStream,
    tokenizer: Any,
) -> TuneSettings | None:
    """The settings of a recipe's ``tune`` section; None where it has none.

    Raises RecipeError for settings that cannot be, for layers in another format than ``bcq`` and ``trellis`` or on a
    grid that other engines must read, and with INT8 attention; CalibrationError without calibration text; KernelError
    on a GPU that the kernels of tuning cannot run on, see check_kernels; and what check_writes does.
    """
    if recipe.tune is None:
        return None
    settings, formats = tune_settings(recipe.name, recipe.tune), set()
    for name, plan in plans.items():
        own = {type(spec) for spec in stored_specs(name, plan, shapes[name])}
        if not own <= set(TUNABLE):
            raise RecipeError(
                f"recipe {recipe.name}: tune is for methods that store the bcq or the trellis format (bcq, rtn, hqq, "
                f"trellis); method {plan.method} of {name} does not"
            )
        formats |= own
        if getattr(plan.settings, "zero", None) == "integer":
            raise RecipeError(f"recipe {recipe.name}: tune leaves no uniform grid; set zero=free, or leave tune out")
    if BcqSpec not in formats and (settings.codes or settings.block_codes):
        raise RecipeError(
            f"recipe {recipe.name}: tune leaves codes of method trellis as they are; leave codes and block_codes out"
        )
    if recipe.attention_bits is not None:
        raise RecipeError(f"recipe {recipe.name}: tune does not go with attention_bits: INT8 attention has no gradient")
    if settings.logits and recipe.head_bits is not None:
        raise RecipeError(
            f"recipe {recipe.name}: tune: logits is true, which takes the model's own head, and head_bits quantizes "
            "it; leave one of them out"
        )
    if artifact is None or len(artifact.windows) < 2:
        raise CalibrationError(
            f"recipe {recipe.name}: tune needs a calibration artifact of 2 windows or more; make one with "
            "'quantkit calibrate' and pass it as `calibration`"
        )
    if settings.written:
        check_writes(stream, tokenizer, settings.written, artifact.windows.shape[1])
    check_kernels(stream.device)
    return settings


def tuning_windows(
    original: Any, tokenizer: Any, windows: Tensor, settings: TuneSettings
) -> tuple[Tensor, TextSource | None]:
    """(windows [n, seq_len] int32 that the whole model is tuned on, of what those are that are not the calibration's).

    original: in memory. windows: the calibration's. With ``written`` the original writes further ones, and all are
    mixed, so that the held-out ones are of both.
    """
    if not settings.written:
        return windows, None
    seed = settings.seed + _WRITING_SEED
    own = write_windows(in_memory_stream(original), tokenizer, settings.written, windows.shape[1], seed=seed)
    source = TextSource(WRITTEN, digest(own), seed, settings.written)
    return mixed([windows, own.to(windows.dtype)], settings.seed), source


def tuned_piece(
    blocks: BlockWork, model: str, work: Workspace, settings: TuneSettings, save: Callable[[Path], None]
) -> dict[str, Any]:
    """Tune the whole model end to end, as the next piece of the work; the report of it for quantkit.json.

    blocks: the work that is finished. model: where the original is. save: writes the checkpoint as it is so far to a
    folder. The piece holds the tensors that changed; its names stand in earlier pieces too, and the last one counts.
    """
    if work.finished > len(blocks.stream.blocks) + 1:
        report: dict[str, Any] = work.document(work.finished - 1)[_TUNING]
        return report
    assert blocks.artifact is not None
    folder = work.folder / "untuned"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save(folder)
    student = load_checkpoint(str(folder), device="cpu", dtype=torch.float32)
    shutil.rmtree(folder)
    original, tokenizer = load_model(model, dtype=torch.float32, device=blocks.stream.device)
    windows, written = tuning_windows(original, tokenizer, blocks.artifact.windows, settings)
    in_memory = BlockWork(
        in_memory_stream(original), blocks.plans, blocks.artifact, blocks.dtype, blocks.activations, attention=False
    )
    transform_part(in_memory, Done())
    report = tune_model(original, student, windows, settings, dtype=blocks.dtype).to_json()
    report |= {} if written is None else {"written": asdict(written)}
    work.commit(_tuned_tensors(student, settings, blocks.dtype), {**Done().to_json(), _TUNING: report})
    return report


def _tuned_tensors(model: nn.Module, settings: TuneSettings, dtype: torch.dtype) -> dict[str, Tensor]:
    """By stored name, the tensors that tuning may change; those that are not quantized in ``dtype``."""
    quantized = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    matrices = embedding_matrices(model) if settings.embeddings else {}
    packed = stored_tensors(model, lambda name: name.rpartition(".")[0] in quantized)
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    found = packed | stored_tensors(model, lambda name: name in vectors)
    floating = {name: tensor for name, tensor in found.items() if tensor.ndim == 1 and tensor.is_floating_point()}
    floating |= stored_tensors(model, lambda name: name in matrices)
    return found | {name: tensor.to(dtype) for name, tensor in floating.items()}
