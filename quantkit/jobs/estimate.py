"""What quantizing a model will write and take, from shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from torch import nn

from quantkit.calibration.artifact import Calibration
from quantkit.checkpoint.config import CheckpointConfig, Prefix, StoredLayer, config_to_json
from quantkit.checkpoint.names import stored_names
from quantkit.checkpoint.write import weight_bytes, weights_metadata
from quantkit.errors import OutputError
from quantkit.formats.base import Shape
from quantkit.formats.table import stored_bytes
from quantkit.integrations.transformers import install_layers, install_prefix
from quantkit.methods import METHODS, LayerPlan
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.stream import ModelStream

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
    GPU, of the GPU.
    """

    layers: tuple[LayerEstimate, ...]
    files: int
    most_files: int
    disk: int
    memory: int
    device: str

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON document."""
        return asdict(self)

    def check_memory(self) -> None:
        """Raise OutputError where the computer's memory cannot hold what is expected."""
        free = psutil.virtual_memory().available
        if self.device == "cpu" and free < self.memory:
            raise OutputError(
                f"quantizing takes about {self.memory / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; "
                "end other programs or use fewer calibration windows"
            )


def estimate(
    stream: ModelStream,
    plans: Mapping[str, LayerPlan],
    artifact: Calibration | None,
    dtype: Any,
    hidden_bytes: int,
    *,
    prefix: Prefix | None = None,
) -> Estimate:
    """Of a model whose layers are planned. dtype: of what stays floating point. hidden_bytes: of one stored value of a
    hidden state, 0 where no text runs through the blocks. prefix: that will be stored."""
    shapes = {name: linear_shape(module) for name, module in block_linears(stream.model).items() if name in plans}
    specs = {name: METHODS[plan.method].stored_specs(plan.settings, shapes[name]) for name, plan in plans.items()}
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
    state = 0 if artifact is None else artifact.windows.numel() * width * hidden_bytes
    return Estimate(
        layers=layers,
        files=files[0],
        most_files=files[-1],
        disk=2 * files[0] + 2 * state,
        memory=_memory(stream, plans, shapes, state),
        device=stream.device.type,
    )


def _file_bytes(stream: ModelStream, config: CheckpointConfig, dtype: Any) -> int:
    """Bytes of all weight files of a checkpoint whose layers are stored so."""
    model: nn.Module = copy.deepcopy(stream.model).to("meta")
    install_layers(model, config.layers)
    install_prefix(model, config)
    return weight_bytes(model.to(dtype), weights_metadata(config_to_json(config)))


def _memory(stream: ModelStream, plans: Mapping[str, LayerPlan], shapes: Mapping[str, Shape], state: int) -> int:
    """The largest of what the parts take, one after the other."""
    parts: dict[str | None, int] = {}
    for name, parameter in stream.model.named_parameters():
        parts[stream.owner(name)] = parts.get(stream.owner(name), 0) + parameter.numel() * _FP32
    outside = parts.pop(None, 0)
    solving = max(rows * columns for rows, columns in shapes.values()) * _FP32 * _SOLVER_COPIES
    widths: dict[str | None, set[tuple[str, int]]] = {}
    for name, plan in plans.items():
        if METHODS[plan.method].needs_hessian(plan.settings):
            # q, k and v share an input, and so do gate and up: one matrix per module that holds Linears and per width
            key = (name.rpartition(".")[0], shapes[name][1])
            widths.setdefault(stream.owner(name), set()).add(key)
    hessians = max(
        (sum(k * k for _, k in own) + _HESSIAN_COPIES * max(k * k for _, k in own) for own in widths.values()),
        default=0,
    )
    return _PROCESS_BYTES + max(outside * 3 // 2, max(parts.values()) * 3 // 2 + solving + hessians * _FP32) + state
