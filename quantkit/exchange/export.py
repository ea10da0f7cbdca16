"""Writing a quantkit checkpoint as a folder that other engines read, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.shards import SHARD_BYTES
from quantkit.checkpoint.summary import layer_order
from quantkit.errors import CheckpointError
from quantkit.exchange.exported import Exported
from quantkit.exchange.targets import TARGETS, Target


@dataclass(frozen=True)
class ExportPlan:
    """roundings: per layer, by how much its levels will differ (see Target.check), 0 where they are exact."""

    target: Target
    roundings: Mapping[str, float]


def plan_export(source: Exported, to: str, *, exact: bool) -> ExportPlan:
    """Check that a format holds every layer. exact: refuse one that rounds.

    Raises CheckpointError for a model that the format does not hold, and naming the first layer that does not fit.
    """
    target = TARGETS[to]
    target.check_model(source)
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
    """Write the model to a folder. Raises OSError, and CheckpointError for weights that cannot be read."""
    made.target.write(source, folder, shard_bytes)
