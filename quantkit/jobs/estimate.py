"""What quantizing a model will write and take, from shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from quantkit.calibration.artifact import Calibration
from quantkit.checkpoint.config import CheckpointConfig, Prefix, StoredLayer, config_to_json
from quantkit.checkpoint.names import stored_names
from quantkit.checkpoint.write import weight_bytes, weights_metadata
from quantkit.errors import OutputError
from quantkit.formats.base import Shape
from quantkit.formats.table import stored_bytes
from quantkit.integrations.transformers import install_layers, install_prefix
from quantkit.jobs.quantize_blocks import HEAD_ROWS
from quantkit.memory import free_bytes
from quantkit.methods import METHODS, LayerPlan, stored_specs, weighs_by_loss
from quantkit.models.block_calls import tokens_at_once
from quantkit.models.families import linear_shape
from quantkit.models.stream import ModelStream
from quantkit.models.structure import untie_head
from quantkit.tuning.block import block_tuning_bytes
from quantkit.tuning.settings import TuneSettings
from quantkit.tuning.whole_model import held_tokens, tokens_of_graph, tokens_of_passes, tuning_bytes

# Chosen so that what scripts/large_model.py measures lies below.
_PROCESS_BYTES = 700_000_000  # torch, transformers and the model's structure
_SOLVER_COPIES = 4  # fp32 matrices of a layer's size that a quantizer holds at once
_HESSIAN_COPIES = 3  # of the largest E[x x^T]: its damped copy, its factor
_FP32 = 4


@dataclass(frozen=True)
class LayerEstimate:
    """A layer to be quantized. name: in the files. bytes, most_bytes: of its tensors; equal unless the data decide."""

    name: str
    method: str
    shape: Shape
    bytes: int
    most_bytes: int


@dataclass(frozen=True)
class Estimate:
    """files, most_files: bytes of the weight files, equal where no format depends on the data.

    disk: bytes needed at the output's place while the work lasts. memory: expected at the peak; where the device is a
    GPU, of the GPU. tunes: whether tuning the whole model decides it.
    """

    layers: tuple[LayerEstimate, ...]
    files: int
    most_files: int
    disk: int
    memory: int
    device: str
    tunes: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON document."""
        return asdict(self)

    def check_memory(self) -> None:
        """Raise OutputError where the memory of the computer, or the GPU's for tuning, cannot hold what is expected."""
        if self.device != "cpu" and not self.tunes:
            return
        free = free_bytes(torch.device(self.device))
        if free < self.memory:
            fewer = (
                "leave tune.codes, tune.embeddings or all of tune out"
                if self.tunes
                else "use fewer calibration windows"
            )
            raise OutputError(
                f"quantizing takes about {self.memory / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; "
                f"end other programs or {fewer}"
            )


def estimate(
    stream: ModelStream,
    plans: Mapping[str, LayerPlan],
    artifact: Calibration | None,
    dtype: Any,
    hidden_bytes: int,
    tuning: TuneSettings | None = None,
    *,
    prefix: Prefix | None = None,
) -> Estimate:
    """Of a model whose layers are planned. dtype: of what stays floating point. hidden_bytes: of one stored value of a
    hidden state, 0 where no text runs through the blocks. tuning: what follows with the whole model in memory. prefix:
    that will be stored."""
    shapes = {name: linear_shape(stream.model.get_submodule(name)) for name in plans}
    specs = {name: stored_specs(name, plan, shapes[name]) for name, plan in plans.items()}
    names = stored_names(stream.model, shapes)
    layers = tuple(
        LayerEstimate(
            names[name],
            plans[name].method,
            shape,
            stored_bytes(specs[name][0], shape),
            stored_bytes(specs[name][-1], shape),
        )
        for name, shape in shapes.items()
    )
    ends = ({name: StoredLayer(own[end], shapes[name]) for name, own in specs.items()} for end in (0, -1))
    files = [_file_bytes(stream, CheckpointConfig(own, (), {}, prefix=prefix), dtype) for own in ends]
    width = stream.model.config.get_text_config().hidden_size
    tokens = 0 if artifact is None else artifact.windows.numel()
    state = tokens * width * hidden_bytes
    weights = sum(rows * columns for rows, columns in shapes.values())
    tuned = 0
    if tuning is not None and tuning.epochs and artifact is not None:
        held = held_tokens(stream.model, tokens_of_passes(artifact.windows, tuning), stream.device)
        sizes = stream.model, weights, held, tuning
        tuned = _PROCESS_BYTES + tuning_bytes(*sizes, at_once=tokens_of_graph(*sizes, stream.device))
    blockwise = _memory(stream, plans, shapes, state, 0 if artifact is None else artifact.meta.saliency)
    if tuning is not None and tuning.blocks:
        seq_len = 0 if artifact is None else artifact.windows.shape[1]
        blockwise = max(blockwise, _block_tuning_memory(stream, shapes, seq_len, tuning) + state)
    return Estimate(
        layers=layers,
        files=files[0],
        most_files=files[-1],
        disk=(3 if tuned else 2) * files[0] + 2 * state,
        memory=max(blockwise, tuned),
        device=stream.device.type,
        tunes=tuned > blockwise,
    )


def _file_bytes(stream: ModelStream, config: CheckpointConfig, dtype: Any) -> int:
    """Bytes of all weight files of a checkpoint whose layers are stored so."""
    model: nn.Module = copy.deepcopy(stream.model).to("meta")
    if any(stream.owner(name) is None for name in config.layers):  # the head
        untie_head(model)
    install_layers(model, config.layers)
    install_prefix(model, config)
    return weight_bytes(model.to(dtype), weights_metadata(config_to_json(config)))


def _block_tuning_memory(stream: ModelStream, shapes: Mapping[str, Shape], seq_len: int, tuning: TuneSettings) -> int:
    """While the largest block is tuned."""
    blocks: dict[str | None, int] = {}
    for name, (rows, columns) in shapes.items():
        blocks[stream.owner(name)] = blocks.get(stream.owner(name), 0) + rows * columns
    blocks.pop(None, None)
    text = stream.model.config.get_text_config()
    outside = sum(p.numel() for name, p in stream.model.named_parameters() if stream.owner(name) is None)
    sizes = max(blocks.values()), tokens_at_once(stream.device, seq_len), text.hidden_size
    predictions = {"outside": outside, "vocabulary": text.vocab_size, "seq_len": seq_len}
    return _PROCESS_BYTES + block_tuning_bytes(*sizes, tuning, **predictions)


def _memory(
    stream: ModelStream, plans: Mapping[str, LayerPlan], shapes: Mapping[str, Shape], state: int, groups: int
) -> int:
    """The largest of what the parts take, one after the other. groups: Hessians of a Linear weighed by the loss."""
    parts: dict[str | None, int] = {}
    for name, parameter in stream.model.named_parameters():
        parts[stream.owner(name)] = parts.get(stream.owner(name), 0) + parameter.numel() * _FP32
    outside = parts.pop(None, 0)
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items() if stream.owner(name) is not None}
    solving = max(sizes.values()) * _FP32 * _SOLVER_COPIES
    heads = [HEAD_ROWS * columns for name, (_, columns) in shapes.items() if name not in sizes]
    outside += sum(heads) * _FP32 * _SOLVER_COPIES
    matrices: dict[str | None, dict[tuple[str, int], int]] = {}
    for name, plan in plans.items():
        if METHODS[plan.method].needs_hessian(plan.settings):
            # q, k and v share an input, and so do gate and up: one matrix per module that holds Linears and per width
            width, several = shapes[name][1], groups if weighs_by_loss(plan) else 0
            key = (name if several else name.rpartition(".")[0], width)
            matrices.setdefault(stream.owner(name), {})[key] = max(several, 1) * width * width
    # behind a rotation, also what the Hessian was before
    copies = _HESSIAN_COPIES + any(getattr(plan.settings, "rotate_inputs", False) for plan in plans.values())
    hessians = max((sum(own.values()) + copies * max(k * k for _, k in own) for own in matrices.values()), default=0)
    return _PROCESS_BYTES + max(outside * 3 // 2, max(parts.values()) * 3 // 2 + solving + hessians * _FP32) + state
