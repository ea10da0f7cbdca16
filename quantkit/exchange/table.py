"""The formats that quantkit converts from, by the quant_method that config.json names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quantkit.checkpoint.config import QUANT_METHOD
from quantkit.errors import CheckpointError
from quantkit.exchange import awq, compressed_tensors, gptq
from quantkit.exchange.gguf import SUFFIX, opened_gguf
from quantkit.exchange.source import (
    Folder,
    Layout,
    Source,
    SourceLayer,
    copy_surroundings,
    opened_folder,
)


@dataclass(frozen=True)
class SourceFormat:
    """One row: what config.json's quant_method stands for.

    name: (quantization_config) -> the format with its version, for people. layers: (folder, weights_only) -> by name.
    layout: (folder) -> how they are read.
    """

    name: Callable[[Mapping[str, Any]], str]
    layers: Callable[[Folder, bool], dict[str, SourceLayer]]
    layout: Callable[[Folder], Layout]


SOURCES: dict[str, SourceFormat] = {
    "gptq": SourceFormat(
        lambda document: "gptq v1" if gptq.version(document) == gptq.V1 else "gptq v2",
        lambda folder, weights_only: gptq.layers(folder),
        gptq.layout,
    ),
    "awq": SourceFormat(
        lambda document: "awq gemm", lambda folder, weights_only: awq.layers(folder), lambda folder: awq.LAYOUT
    ),
    "compressed-tensors": SourceFormat(
        lambda document: str(document.get("format")),
        lambda folder, weights_only: compressed_tensors.layers(folder, weights_only=weights_only),
        lambda folder: compressed_tensors.LAYOUT,
    ),
}


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, or what should be one."""
    return path.suffix == SUFFIX and not path.is_dir()


@contextmanager
def opened_source(path: Path, *, weights_only: bool = False) -> Iterator[Source]:
    """A quantized model of another tool, its files open while entered.

    weights_only: take the weights of layers whose quantized activations have no kernels here.
    Raises CheckpointError for what is no such model, of an unknown format, or incomplete.
    """
    if is_gguf(path):
        with opened_gguf(path) as source:
            yield source
        return
    if not path.is_dir():
        raise CheckpointError(f"source {path}: no such folder")
    with opened_folder(path, partial(_check_method, path)) as folder:
        row = SOURCES[folder.document["quant_method"]]
        layers = row.layers(folder, weights_only)
        consumed = {name for layer in layers.values() for name in layer.fields.values()}
        others = tuple(name for name in folder.tensors if name not in consumed)
        yield Source(
            method=row.name(folder.document),
            config=folder.config,
            layers=layers,
            layout=row.layout(folder),
            others=others,
            matrices=tuple(name for name in others if len(folder.tensors[name].shape) == 2),
            get=folder.get,
            write_surroundings=partial(copy_surroundings, path),
            bytes=sum(tensor.bytes for tensor in folder.tensors.values()),
        )


def _check_method(path: Path, document: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless ``quant_method`` names a row of SOURCES."""
    method = document.get("quant_method")
    if method == QUANT_METHOD:
        raise CheckpointError(f"source {path}: is a quantkit checkpoint already; 'quantkit export' writes others")
    if not isinstance(method, str) or method not in SOURCES:
        known = ", ".join(sorted(SOURCES))
        raise CheckpointError(f"source {path}: quant_method is {method!r}; quantkit converts {known} and GGUF files")
