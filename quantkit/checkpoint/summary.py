"""What ``quantkit inspect`` shows: every layer of a checkpoint, and its size in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import ATTENTION_BITS, bits_per_weight
from quantkit.checkpoint.read import (
    read_checkpoint,
    read_document,
    read_headers,
    read_report,
    start_verifying,
    weight_files,
)
from quantkit.checkpoint.write import folder_bytes
from quantkit.errors import CheckpointError
from quantkit.formats.table import FORMATS, format_name, stored_bytes


@dataclass(frozen=True)
class LayerSummary:
    """One quantized Linear. settings: the spec's fields. measured: what the quantizer reported."""

    name: str
    method: str
    format: str
    shape: tuple[int, int]
    weight_bits: int
    act_bits: int
    settings: Mapping[str, Any]
    bytes: int
    bits_per_weight: float
    measured: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointSummary:
    """bits_per_weight and quantized_bytes: of the quantized layers. bytes: of all weight files.

    ignore: Linears left in floating point. attention_bits: of the codes of attention's products, or None.
    digests: tensors that have one; 0 in an unverified checkpoint. verified: whether all were compared just now.
    """

    layers: tuple[LayerSummary, ...]
    ignore: tuple[str, ...]
    bits_per_weight: float
    bytes: int
    quantized_bytes: int
    recipe: str
    calibration: Mapping[str, Any] | None
    attention_bits: int | None
    digests: int
    verified: bool

    def to_json(self) -> dict[str, Any]:
        """All of it as a JSON document."""
        return asdict(self)


def layer_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts block 2 before block 10; config.json holds the names in alphabetical order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def summarize(folder: Path, *, verify: bool = False) -> CheckpointSummary:
    """Read a checkpoint's config, headers and report; no tensor is loaded.

    verify: compare every tensor and every file with its digest. Raises CheckpointError as read_checkpoint and
    read_report do, and under ``verify`` for what was altered, or a checkpoint without digests.
    """
    config, files = read_checkpoint(folder), read_headers(weight_files(folder))
    digests = sum(len(file.tensors) for file in files if file.digests)
    if verify and not start_verifying(files, read_document(folder)).finish():
        raise CheckpointError(
            f"checkpoint {folder}: holds no digests to compare; a quantkit without them wrote it, or transformers did"
        )
    report = read_report(folder).get("layers", {})
    layers = []
    for name, layer in sorted(config.layers.items(), key=lambda item: layer_order(item[0])):
        row, size = FORMATS[format_name(layer.spec)], stored_bytes(layer.spec, layer.shape)
        measured = dict(report.get(name, {}))
        layers.append(
            LayerSummary(
                name=name,
                method=measured.pop("method", format_name(layer.spec)),
                format=format_name(layer.spec),
                shape=layer.shape,
                weight_bits=row.weight_bits(layer.spec),
                act_bits=row.act_bits(layer.spec),
                settings=asdict(layer.spec),
                bytes=size,
                bits_per_weight=8 * size / (layer.shape[0] * layer.shape[1]),
                measured=measured,
            )
        )
    return CheckpointSummary(
        layers=tuple(layers),
        ignore=config.ignore,
        bits_per_weight=bits_per_weight(config),
        bytes=folder_bytes(folder),
        quantized_bytes=sum(layer.bytes for layer in layers),
        recipe=str(config.meta.get("recipe")),
        calibration=config.meta.get("calibration"),
        attention_bits=ATTENTION_BITS if config.attention else None,
        digests=digests,
        verified=verify,
    )
