"""Writing a quantkit checkpoint as a folder that other engines read, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from quantkit.checkpoint.shards import SHARD_BYTES, ShardWriter
from quantkit.checkpoint.summary import layer_order
from quantkit.errors import CheckpointError
from quantkit.exchange.convert import write_config
from quantkit.exchange.exported import Exported
from quantkit.exchange.source import copy_surroundings
from quantkit.exchange.targets import TARGETS, Target
from quantkit.progress import track


@dataclass(frozen=True)
class ExportPlan:
    """roundings: per layer, by how much its levels will differ (see Target.check), 0 where they are exact."""

    target: Target
    roundings: Mapping[str, float]


def plan_export(source: Exported, to: str, *, exact: bool) -> ExportPlan:
    """Check that a format holds every layer. exact: refuse one that rounds.

    Raises CheckpointError naming the first layer that does not fit.
    """
    target = TARGETS[to]
    roundings = {}
    for name in sorted(source.layers, key=layer_order):
        roundings[name] = target.check(source.layers[name])
        if exact and roundings[name]:
            raise CheckpointError(
                f"{name}: {to} rounds its offsets; without `exact` by up to {roundings[name]:.2g} of the largest "
                "weight of a group"
            )
    return ExportPlan(target, roundings)


def write_export(source: Exported, made: ExportPlan, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, the surroundings and the weights. Raises OSError, and CheckpointError for unreadable ones."""
    copy_surroundings(source.path, folder)
    write_config({**source.config, **made.target.document(source.layers, source.stored.ignore)}, folder)
    writer = ShardWriter(folder, {"format": made.target.metadata}, shard_bytes, _save)
    for name, tensor in _tensors(source, made.target):
        writer.add(name, tensor)
    writer.finish()


def _tensors(source: Exported, target: Target) -> Iterator[tuple[str, Tensor]]:
    names = sorted([*source.layers, *source.others], key=layer_order)
    for name in track(names, "exporting", total=len(names)):
        if name not in source.layers:
            yield name, source.get(name)
            continue
        for field, tensor in target.fields(source, source.layers[name], source.layers).items():
            yield f"{name}.{field}", tensor


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=dict(metadata))
