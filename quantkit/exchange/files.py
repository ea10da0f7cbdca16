"""Writing a checkpoint as a folder of safetensors files, whose config.json says how the weights are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.shards import ShardWriter
from quantkit.checkpoint.summary import layer_order
from quantkit.exchange.convert import write_config
from quantkit.exchange.exported import Exported, ExportLayer
from quantkit.exchange.source import copy_surroundings
from quantkit.progress import track

Layers = Mapping[str, ExportLayer]
Fields = Callable[[Exported, ExportLayer, Layers], dict[str, Tensor]]
"""(checkpoint, layer, all layers) -> the layer's tensors."""
Document = Callable[[Layers, tuple[str, ...]], dict[str, Any]]
"""(all layers, Linears left in floating point) -> entries of config.json."""


def write_files(
    source: Exported, folder: Path, shard_bytes: int, *, fields: Fields, document: Document, metadata: str
) -> None:
    """Write config.json, the surroundings and the weights. metadata: what the files call their format.

    Raises OSError, and CheckpointError for weights that cannot be read.
    """
    copy_surroundings(source.path, folder)
    write_config({**source.config, **document(source.layers, source.stored.ignore)}, folder)
    writer = ShardWriter(folder, {"format": metadata}, shard_bytes, _save)
    for name, tensor in _tensors(source, fields):
        writer.add(name, tensor)
    writer.finish()


def _tensors(source: Exported, fields: Fields) -> Iterator[tuple[str, Tensor]]:
    names = sorted([*source.layers, *source.others], key=layer_order)
    for name in track(names, "exporting", total=len(names)):
        if name not in source.layers:
            yield name, source.get(name)
            continue
        for field, tensor in fields(source, source.layers[name], source.layers).items():
            yield f"{name}.{field}", tensor


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=dict(metadata))
