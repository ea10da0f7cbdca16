"""What ``quantkit inspect`` shows of a model that another tool quantized, without converting it."""

from __future__ import annotations

from pathlib import Path

from quantkit.checkpoint.config import QUANT_METHOD
from quantkit.checkpoint.summary import CheckpointSummary, LayerSummary, layer_order
from quantkit.errors import CheckpointError
from quantkit.exchange.source import read_config
from quantkit.exchange.table import is_gguf, opened_source


def is_foreign(path: Path) -> bool:
    """Whether a path is a model that another tool quantized, as far as its configuration says.

    Raises CheckpointError for a folder without a readable config.json.
    """
    if is_gguf(path):
        return True
    if (path / "quantize_config.json").is_file():
        return True
    document = read_config(path).get("quantization_config")
    return isinstance(document, dict) and document.get("quant_method") != QUANT_METHOD


def summarize_source(path: Path, *, verify: bool = False) -> CheckpointSummary:
    """The layers of a source, from its headers.

    Raises CheckpointError as opened_source does, and for ``verify``, as other tools write no digests.
    """
    if verify:
        raise CheckpointError(f"source {path}: holds no digests to compare; quantkit did not write it")
    with opened_source(path, weights_only=True) as source:
        layers = tuple(
            LayerSummary(
                name=name,
                method=source.method,
                format=source.method,
                shape=layer.shape,
                weight_bits=layer.bits,
                act_bits=layer.act_bits,
                settings={"group_size": layer.group_size},
                bytes=layer.bytes,
                bits_per_weight=8 * layer.bytes / (layer.shape[0] * layer.shape[1]),
                measured={"kind": layer.kind} if layer.kind else {},
            )
            for name, layer in sorted(source.layers.items(), key=lambda item: layer_order(item[0]))
        )
        ignore = [name.removesuffix(".weight") for name in source.matrices]
        stored = sum(layer.bytes for layer in layers)
        weights = sum(layer.shape[0] * layer.shape[1] for layer in layers)
        return CheckpointSummary(
            layers=layers,
            ignore=tuple(sorted(ignore, key=layer_order)),
            bits_per_weight=8 * stored / max(1, weights),
            bytes=source.bytes,
            quantized_bytes=stored,
            recipe=f"none: written by {source.method}",
            calibration=None,
            attention_bits=None,
            digests=0,
            verified=False,
        )
