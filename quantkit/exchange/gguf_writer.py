"""Writing a checkpoint of a Llama as one GGUF file, by the gguf package: metadata, tokenizer and tensors.

llama.cpp rotates neighbouring rows of q and k, transformers rows half a head apart: within a head, row i of the two
halves (0, i), (1, i) goes to rows 2i and 2i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.checkpoint.summary import layer_order
from quantkit.errors import CheckpointError
from quantkit.exchange.exported import Exported, ExportLayer
from quantkit.exchange.gguf import check_installed
from quantkit.exchange.gguf_pack import block_fit, packed_blocks
from quantkit.exchange.gguf_vocabulary import read_vocabulary, write_vocabulary
from quantkit.progress import track

FILE = "model.gguf"
_MODEL_TYPE = "llama"
_EXPECTED = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}  # of every GGUF llama
_ROPE_SETTINGS = ("rope_type", "rope_theta", "type")
_FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file. kind: its GGUF type. shape: of its numbers. bytes: all of it. read: the numpy array."""

    name: str
    kind: str
    shape: tuple[int, ...]
    bytes: int
    read: Callable[[], Any]


def check_layer(layer: ExportLayer) -> float:
    """By how much the smallest block type rounds a layer. Raises CheckpointError where none holds it."""
    return block_fit(layer).rounding


def check_model(source: Exported) -> None:
    """Raise CheckpointError for a model or tokenizer that GGUF's llama does not describe."""
    check_installed()
    config = source.config
    if config.get("model_type") != _MODEL_TYPE:
        raise CheckpointError(
            f"checkpoint {source.path}: is a {config.get('model_type')!r}; quantkit writes {_MODEL_TYPE} to GGUF; "
            "export to compressed-tensors"
        )
    for name, value in _EXPECTED.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"checkpoint {source.path}: {name} is {config[name]!r}, which GGUF's llama has not")
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type", "default")) != "default" or set(rope) - set(_ROPE_SETTINGS):
        raise CheckpointError(
            f"checkpoint {source.path}: its rotary positions are scaled, which is not written to GGUF"
        )
    names = _names(config)
    for name in [*source.layers, *(other.rpartition(".")[0] for other in source.others)]:
        if names(name) is None:
            raise CheckpointError(f"{name}: has no place in GGUF's llama; export to compressed-tensors")
    read_vocabulary(source.path, int(config["vocab_size"]))


def write(source: Exported, folder: Path, _shard_bytes: int) -> None:
    """Write the file, tensor by tensor. Raises OSError, and CheckpointError for weights that cannot be read."""
    import gguf

    entries = list(_entries(source))
    writer = gguf.GGUFWriter(folder / FILE, _MODEL_TYPE)
    _write_metadata(writer, source.config)
    kinds = [entry.kind for entry in entries if entry.kind not in _FLOATS.values()]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{max(dict.fromkeys(kinds), key=kinds.count)}"])
    write_vocabulary(writer, read_vocabulary(source.path, int(source.config["vocab_size"])))
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind]
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in track(entries, "exporting", total=len(entries)):
        writer.write_tensor_data(_rotated(entry.read(), entry.name, source.config))
    writer.close()


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _write_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(_rope(config).get("rope_theta") or config.get("rope_theta") or 10000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _names(config: Mapping[str, Any]) -> Callable[[str], str | None]:
    """A module's name in transformers -> in GGUF."""
    import gguf

    names: Callable[[str], str | None] = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"]
    ).get_name
    return names


def _entries(source: Exported) -> Iterator[_Entry]:
    """Every tensor of the file, in the order of the model."""
    names = _names(source.config)
    for name in sorted([*source.layers, *source.others], key=layer_order):
        if name in source.layers:
            yield _blocks(source, source.layers[name], f"{names(name)}.weight")
        else:
            module, _, field = name.rpartition(".")
            yield _numbers(source.get(name), f"{names(module)}.{field}", lambda name=name: source.get(name))  # type: ignore[misc]


def _blocks(source: Exported, layer: ExportLayer, name: str) -> _Entry:
    import gguf

    fit = block_fit(layer)
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[fit.kind]]

    def read() -> Any:
        return packed_blocks(source.codes(layer), fit, layer.uniform)

    return _Entry(name, fit.kind, layer.shape, layer.shape[0] * layer.shape[1] // weights * size, read)


def _numbers(tensor: Tensor, name: str, get: Callable[[], Tensor]) -> _Entry:
    """A tensor in floating point; vectors are fp32, as llama.cpp wants them."""
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{name}: is {tensor.dtype}, which GGUF does not hold here")
    dtype = torch.float32 if tensor.ndim == 1 else tensor.dtype

    def read() -> Any:
        return get().to(dtype).contiguous().view(torch.uint8).numpy()

    return _Entry(name, _FLOATS[dtype], tuple(tensor.shape), tensor.numel() * dtype.itemsize, read)


def _rotated(rows: Any, name: str, config: Mapping[str, Any]) -> Any:
    """The rows of q and k [N, ...] in llama.cpp's order; those of other tensors as they are."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return rows
    half = _head_dim(config) // 2
    return np.ascontiguousarray(rows.reshape(-1, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))
