"""Writing a source as a quantkit checkpoint, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import quantkit
from quantkit.checkpoint.config import CheckpointConfig, StoredLayer, config_digest, config_to_json
from quantkit.checkpoint.read import CONFIG_DIGEST
from quantkit.checkpoint.shards import SHARD_BYTES, ShardWriter
from quantkit.checkpoint.summary import layer_order
from quantkit.checkpoint.write import write_report
from quantkit.errors import CheckpointError, refusing
from quantkit.exchange.source import COPY, Source, SourceLayer
from quantkit.formats.base import PackedWeight
from quantkit.models.families import linear_shape
from quantkit.models.structure import LINEAR_TYPES, submodule
from quantkit.progress import track


@dataclass(frozen=True)
class Plan:
    """What a conversion will write: the config of the result, and per layer what ``inspect`` will show.

    dropped: stored tensors that the model has no place for, and which hold zeros.
    """

    config: CheckpointConfig
    reports: Mapping[str, Mapping[str, Any]]
    dropped: frozenset[str]


def plan(source: Source, folder: Path, *, exact: bool) -> Plan:
    """Check every layer against the model, and fit its scales; codes are not read.

    folder: where config.json is written on the way. Raises CheckpointError for layers that the model lacks, that have
    another shape there, or whose scales cannot be stored; and as ``fitted`` does for ``exact``.
    """
    if not source.layers:
        raise CheckpointError(f"source: quantization_config says {source.method}, but no layer is stored so")
    model = _skeleton(source.config, folder)
    stored, reports = {}, {}
    for name in sorted(source.layers, key=layer_order):
        layer = source.layers[name]
        _check_module(model, layer)
        packed = source.layout.packed(layer, source.get)
        fit = packed or source.layout.fit(layer, source.get, exact=exact)
        stored[name] = StoredLayer(fit.spec, layer.shape)
        report = fit.report if isinstance(fit, PackedWeight) else fit.report()
        note = {"note": layer.note} if layer.note else {}
        method = f"{source.method} {layer.kind}".rstrip()
        reports[name] = {"method": method, **report, **note}
    linears = (name for name, module in model.named_modules() if isinstance(module, LINEAR_TYPES))
    ignore = tuple(name for name in linears if name not in stored)
    meta = {
        "quantizer": f"quantkit {quantkit.__version__}",
        "recipe": f"converted from {source.method}",
        "calibration": None,
    }
    return Plan(CheckpointConfig(stored, ignore, meta), reports, _biases_of_none(model, source))


def write(source: Source, made: Plan, folder: Path, *, exact: bool, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, the surroundings, the weights with their digests, and the report.

    Raises OSError, and CheckpointError for tensors that cannot be read.
    """
    document = config_to_json(made.config)
    write_config({**source.config, "quantization_config": document}, folder)
    source.write_surroundings(folder)
    writer = ShardWriter(folder, {"format": "pt", CONFIG_DIGEST: config_digest(document)}, shard_bytes)
    for name, tensor in _tensors(source, made, exact=exact):
        writer.add(name, tensor)
    writer.finish()
    report = {"quantkit": quantkit.__version__, "source": source.method, "layers": dict(made.reports)}
    write_report({**report, "calibration": None}, folder)


def _tensors(source: Source, made: Plan, *, exact: bool) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the result, block by block."""
    parts: list[tuple[str, Callable[[], Mapping[str, Tensor]]]] = []
    for name, layer in source.layers.items():
        parts.append((name, lambda layer=layer: _packed(source, layer, exact=exact).tensors))  # type: ignore[misc]
    kept = [name for name in source.others if name not in made.dropped]
    parts += [(name, lambda name=name: {"": source.get(name)}) for name in kept]  # type: ignore[misc]
    parts.sort(key=lambda part: layer_order(part[0]))
    for name, read in track(parts, "converting", total=len(parts)):
        for field, tensor in read().items():
            yield (f"{name}.{field}" if field else name), tensor


def _packed(source: Source, layer: SourceLayer, *, exact: bool) -> PackedWeight:
    packed = source.layout.packed(layer, source.get)
    if packed is None:
        packed = source.layout.fit(layer, source.get, exact=exact).pack(source.layout.codes(layer, source.get))
    return packed


def _skeleton(config: Mapping[str, Any], folder: Path) -> nn.Module:
    """The model of a config on the meta device."""
    write_config(config, folder)
    with refusing("source: its config.json describes no model that transformers builds", CheckpointError):
        built = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
    return model


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """Write config.json. Raises OSError."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_module(model: nn.Module, layer: SourceLayer) -> None:
    module = submodule(model, layer.name)
    if not isinstance(module, LINEAR_TYPES):
        raise CheckpointError(
            f"{layer.name}: is quantized in the source, but the model has no such Linear; experts that transformers "
            "keeps in one tensor are not converted"
        )
    if linear_shape(module) != layer.shape:
        raise CheckpointError(f"{layer.name}: config.json builds it as {linear_shape(module)}, stored is {layer.shape}")


def _biases_of_none(model: nn.Module, source: Source) -> frozenset[str]:
    """Biases of zeros that some tools store for Linears that have none. Raises CheckpointError for others."""
    dropped = set()
    for name in source.layers:
        bias = f"{name}.bias"
        if bias in source.others and getattr(submodule(model, name), "bias", None) is None:
            if bool(source.get(bias).any()):
                raise CheckpointError(f"{bias}: is stored, but the model's Linear has none; {COPY}")
            dropped.add(bias)
    return frozenset(dropped)
