"""A quantkit checkpoint as other tools can store it: every layer a uniform grid, or INT8 on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.checkpoint.config import CheckpointConfig, StoredLayer
from quantkit.checkpoint.read import read_checkpoint, read_document, read_headers, start_verifying, weight_files
from quantkit.errors import CheckpointError, refusing
from quantkit.exchange.grid import Grid, uniform_grid
from quantkit.exchange.source import Get, read_config
from quantkit.formats.base import Shape
from quantkit.formats.bcq import BcqSpec, BcqTensors
from quantkit.formats.flatten import FlattenSpec
from quantkit.formats.planes import unpack_codes
from quantkit.formats.table import FORMATS, format_name
from quantkit.storage.tensors import verifies

_PLUGIN = "serve the checkpoint itself: 'vllm serve DIR' with quantkit installed, whose plugin runs it"


@dataclass(frozen=True)
class ExportLayer:
    """One Linear to export.

    grid: its levels; None where both sides are INT8 with static scales (the ``flatten`` format without extra columns).
    row_scales: whether the weight of such a layer has one scale per row; the activations have one in all.
    """

    name: str
    shape: Shape
    grid: Grid | None
    row_scales: bool = False

    @property
    def uniform(self) -> Grid:
        """The grid of a layer that has one. Raises CheckpointError for INT8 on both sides."""
        if self.grid is None:
            raise CheckpointError(
                f"{self.name}: has INT8 activations, which this format does not hold; export to compressed-tensors"
            )
        return self.grid

    def step(self) -> Tensor:
        """[N, G] fp16, the grid's steps, exact. Raises CheckpointError beyond fp16."""
        step = self.uniform.step.half()
        if not torch.equal(step.double(), self.uniform.step):
            raise CheckpointError(f"{self.name}: its steps are beyond fp16")
        return step

    @property
    def is_symmetric(self) -> bool:
        """Whether every zero point is 2**(bits - 1)."""
        grid = self.grid
        return grid is None or (grid.zero is not None and bool((grid.zero == 2 ** (grid.bits - 1)).all()))


@dataclass(frozen=True)
class Exported:
    """A checkpoint opened for export. config: config.json without its quantization_config. get: any stored tensor."""

    path: Path
    config: Mapping[str, Any]
    stored: CheckpointConfig
    layers: Mapping[str, ExportLayer]
    others: tuple[str, ...]
    get: Get

    def codes(self, layer: ExportLayer) -> Tensor:
        """[N, K] uint8 of a layer with a grid."""
        return unpack_codes(self.get(f"{layer.name}.signs"), layer.shape[1])

    def field(self, layer: ExportLayer, name: str) -> Tensor:
        """A stored tensor of a layer."""
        return self.get(f"{layer.name}.{name}")


@contextmanager
def opened_checkpoint(folder: Path) -> Iterator[Exported]:
    """A quantkit checkpoint, its files open while entered; scales are read, codes are not.

    Raises CheckpointError for one that is damaged, and for layers that are no uniform grid.
    """
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder}: no such folder")
    stored = read_checkpoint(folder)
    if stored.attention:
        raise CheckpointError(f"checkpoint {folder}: its attention is INT8, which no other format holds")
    if stored.prefix is not None:
        raise CheckpointError(f"checkpoint {folder}: has a key/value prefix, which no other format holds")
    headers = read_headers(weight_files(folder))
    verification = start_verifying(headers, read_document(folder)) if verifies() else None
    config = read_config(folder)
    config.pop("quantization_config")
    places: dict[str, Any] = {}
    with ExitStack() as stack:
        for file in headers:
            with refusing(f"checkpoint file {file.path} cannot be read", CheckpointError):
                handle = stack.enter_context(safe_open(file.path, framework="pt"))
            places |= dict.fromkeys(file.tensors, handle)

        def get(name: str) -> Tensor:
            with refusing(f"{name} cannot be read", CheckpointError):
                tensor: Tensor = places[name].get_tensor(name)
                return tensor

        layers = {name: _layer(name, layer, get) for name, layer in stored.layers.items()}
        if verification is not None:
            verification.finish()
        own = {f"{name}.{field}" for name, layer in stored.layers.items() for field in _fields(layer)}
        others = tuple(name for name in places if name not in own)
        yield Exported(folder, config, stored, layers, others, get)


def _fields(layer: StoredLayer) -> Mapping[str, Any]:
    return FORMATS[format_name(layer.spec)].tensors(layer.spec, layer.shape)


def _layer(name: str, layer: StoredLayer, get: Get) -> ExportLayer:
    spec = layer.spec
    if isinstance(spec, FlattenSpec):
        _check_plain(name, spec, get, layer.shape[1])
        return ExportLayer(name, layer.shape, None, spec.row_scales)
    if not isinstance(spec, BcqSpec):
        raise CheckpointError(f"{name}: is stored as {format_name(spec)}, which no other format holds; {_PLUGIN}")
    _check_unrotated(name, spec)
    fields = {field: get(f"{name}.{field}") for field in _fields(layer) if field != "signs"}
    grid = uniform_grid(BcqTensors(signs=fields["scales"], **fields), spec)
    if grid is None:
        raise CheckpointError(f"{name}: its scales are free (binary coding), which no other format holds; {_PLUGIN}")
    return ExportLayer(name, layer.shape, grid)


def _check_unrotated(name: str, spec: BcqSpec | FlattenSpec) -> None:
    if spec.rotate_inputs:
        raise CheckpointError(f"{name}: its inputs are rotated, which no other format says; {_PLUGIN}")


def _check_plain(name: str, spec: FlattenSpec, get: Get, columns: int) -> None:
    """Raise CheckpointError unless a ``flatten`` layer is INT8 without smoothing at run time or extra columns."""
    if (spec.weight_bits, spec.act_bits) != (8, 8):
        raise CheckpointError(f"{name}: is W{spec.weight_bits}A{spec.act_bits} with static scales; {_PLUGIN}")
    _check_unrotated(name, spec)
    if spec.smooth:
        raise CheckpointError(f"{name}: is smoothed at run time; quantize with smooth_unfed: false to export it")
    if bool(get(f"{name}.source_segment").any()) or bool(get(f"{name}.codes")[:, columns:].any()):
        raise CheckpointError(f"{name}: has channels split over extra columns; {_PLUGIN}")
