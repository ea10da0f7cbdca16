"""Reading GGUF files: tensors by the gguf package, names, config and tokenizer by transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantkit.errors import CheckpointError, refusing
from quantkit.exchange.gguf_blocks import BLOCK_TYPES, block_codes, block_grid
from quantkit.exchange.grid import Grid
from quantkit.exchange.source import COPY, Get, Layout, Source, SourceLayer
from quantkit.models.structure import LINEAR_TYPES, submodule

SUFFIX = ".gguf"
_UNUSED = ("rope_freqs.weight",)  # transformers computes them
_FLOATS = ("F32", "F16", "BF16", "F64")


def check_installed() -> None:
    """Raise CheckpointError without the gguf package."""
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError("reading GGUF files needs the gguf package: pip install 'quantkit[gguf]'")


@contextmanager
def opened_gguf(path: Path) -> Iterator[Source]:
    """A GGUF file as a source, mapped into memory while entered.

    Raises CheckpointError for a damaged file, an architecture whose tensors transformers rearranges in another way than
    by rows, or a block type that is not known.
    """
    check_installed()
    if not path.is_file():
        raise CheckpointError(f"source {path}: no such file")
    from gguf import GGUFReader

    with refusing(f"source {path} cannot be read", CheckpointError, COPY):
        reader = GGUFReader(path)
        config, model = _model(path)
        names, processor = _names(model, config)
        tensors = {names[tensor.name]: tensor for tensor in reader.tensors if tensor.name in names}
        unknown = [t.name for t in reader.tensors if t.name not in names and t.name not in _UNUSED]
        if unknown:
            raise ValueError(f"the tensor {unknown[0]} has no place in this model")
        layers = {layer.name: layer for layer in _layers(tensors, model)}
    consumed = {name for layer in layers.values() for name in layer.fields.values()}

    def get(name: str) -> Tensor:
        with refusing(f"{name}: cannot be read from {path}", CheckpointError, COPY):
            return _floats(tensors[name], processor)

    def blocks(layer: SourceLayer) -> Any:
        with refusing(f"{layer.name}: cannot be read from {path}", CheckpointError, COPY):
            return _rows(tensors[layer.fields["weight"]], processor)

    def grid(layer: SourceLayer, _get: Get) -> Grid:
        return block_grid(blocks(layer), layer.kind, layer.name)

    def codes(layer: SourceLayer, _get: Get) -> Tensor:
        return block_codes(blocks(layer), layer.kind)

    others = tuple(name for name in tensors if name not in consumed)
    yield Source(
        method="gguf",
        config={**config, "dtype": "float16"},
        layers=layers,
        layout=Layout(grid, codes),
        others=others,
        matrices=tuple(name for name in others if len(tensors[name].shape) == 2),
        get=get,
        write_surroundings=lambda folder: _write_tokenizer(path, folder),
        bytes=path.stat().st_size,
    )


def _model(path: Path) -> tuple[dict[str, Any], nn.Module]:
    """(config.json, the model on the meta device) of a GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    config.architectures = [type(model).__name__]
    return dict(config.to_dict()), model


def _names(model: nn.Module, config: Mapping[str, Any]) -> tuple[Mapping[str, str], Any]:
    """The model's name of each tensor of the file, and what puts their rows in the model's order."""
    from transformers import modeling_gguf_pytorch_utils as loader

    architecture = str(config.get("model_type"))
    kind = loader.TENSOR_PROCESSORS.get(architecture, loader.TensorProcessor)
    if kind not in (loader.TensorProcessor, loader.LlamaTensorProcessor):
        raise ValueError(f"the architecture {architecture} is not converted: its tensors are not kept row by row")
    processor = kind(config=dict(config))
    return loader.get_gguf_hf_weights_map(model, processor), processor


def _layers(tensors: Mapping[str, Any], model: nn.Module) -> Iterator[SourceLayer]:
    for name, tensor in tensors.items():
        module, kind = name.removesuffix(".weight"), tensor.tensor_type.name
        if kind in _FLOATS or not isinstance(submodule(model, module), LINEAR_TYPES):
            continue
        if kind not in BLOCK_TYPES:
            raise CheckpointError(f"{module}: is stored as {kind}; known: {', '.join(BLOCK_TYPES)}")
        columns, rows = map(int, tensor.shape)  # GGUF counts the innermost dimension first
        group_size = BLOCK_TYPES[kind].group_size
        size = int(tensor.n_bytes)
        yield SourceLayer(
            module, (rows, columns), BLOCK_TYPES[kind].bits, group_size, {"weight": name}, size, kind=kind
        )


def _rows(tensor: Any, processor: Any) -> Any:
    """The bytes [N, bytes per row], or values [N, K], of a tensor, rows in the model's order."""
    return np.ascontiguousarray(processor.process(weights=np.asarray(tensor.data), name=tensor.name).weights)


def _floats(tensor: Any, processor: Any) -> Tensor:
    """A tensor in floating point, exact; blocks give fp32."""
    from gguf.quants import dequantize

    kind = tensor.tensor_type
    if kind.name == "F16":
        return torch.from_numpy(_rows(tensor, processor).astype(np.float16))
    return torch.from_numpy(np.array(dequantize(_rows(tensor, processor), kind), dtype=np.float32))


def _write_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    with refusing(f"source {path}: its tokenizer cannot be read", CheckpointError):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    tokenizer.save_pretrained(folder)
    GenerationConfig.from_model_config(AutoConfig.from_pretrained(path.parent, **where)).save_pretrained(folder)
