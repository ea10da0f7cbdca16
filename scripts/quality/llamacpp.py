"""llama.cpp's block types for ``peers.py``: its program llama-quantize on the Linears of a model.

The program reads and writes files and looks at names, rows and columns alone. So a file holds the Linears, named as a
Llama's of so many blocks, and nothing else: models that llama.cpp does not run are quantized as well. The importance
matrix holds the mean squares of inputs in the calibration artifact, which are what llama-imatrix measures.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantkit.errors import EvaluationError
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.loading import load_model
from scripts.quality.peer import Inputs, Quantized, Setting

OPTION = "--llama-quantize"
_PARTS = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "out_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "fc1": "ffn_up",
    "down_proj": "ffn_down",
    "fc2": "ffn_down",
}
_BUILD = re.compile(r"build = .*|version: .*")


def llamacpp(mixed: bool) -> Callable[[Inputs, Setting], Quantized]:
    """One type for every Linear, rows padded with zeros to whole blocks; or one of its named mixtures."""

    def quantize(inputs: Inputs, setting: Setting) -> Quantized:
        import gguf

        loaded, _ = load_model(inputs.model, dtype=torch.float32)
        weights = {name: linear_weight(module).detach() for name, module in block_linears(loaded).items()}
        squares = {name: inputs.calibration.layers[name].mean_square for name in weights}
        chosen, block = [setting.kind], 1
        if not mixed:
            if setting.kind not in gguf.GGMLQuantizationType.__members__:
                raise EvaluationError(f"--peers {setting.label}: {setting.kind} is not a type of the gguf package")
            block, _size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[setting.kind]]
            chosen = ["--pure", "--tensor-type", f"blk={setting.kind.lower()}", "Q8_0"]
        with tempfile.TemporaryDirectory() as folder:
            source, importance, out = (Path(folder) / f"{name}.gguf" for name in ("model", "importance", "out"))
            _write_model(source, loaded.config, {name: padded(weight, block) for name, weight in weights.items()})
            _write_importance(importance, {name: padded(values, block) for name, values in squares.items()})
            *options, kind = chosen
            files = [str(source), str(out), kind, str(os.cpu_count() or 1)]
            build = _run([str(inputs.llama_quantize), "--imatrix", str(importance), *options, *files])
            return _read(out, weights, build)

    return quantize


def tensor_name(layer: str) -> str:
    """What llama.cpp calls the weight of a Linear. Raises EvaluationError for one that a Llama has not."""
    found = re.search(r"\.layers\.(\d+)\.(?:[a-z_]+\.)?(\w+)$", layer)
    if found is None or found[2] not in _PARTS:
        raise EvaluationError(f"{layer}: has no name in llama.cpp's Llama")
    return f"blk.{found[1]}.{_PARTS[found[2]]}.weight"


def padded(values: Tensor, block: int) -> Tensor:
    """[..., K] with zeros behind, up to a multiple of ``block``."""
    return torch.nn.functional.pad(values, (0, -values.shape[-1] % block))


def _write_model(path: Path, config: Any, weights: Mapping[str, Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    heads = config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(max(weight.shape[0] for weight in weights.values()))
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_layer_norm_rms_eps(1e-5)  # asked for, not used
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _write(writer, {tensor_name(name): weight for name, weight in weights.items()})


def _write_importance(path: Path, squares: Mapping[str, Tensor]) -> None:
    """A file of llama-imatrix: sums of squares and how many they are of, here their mean and 1."""
    import gguf

    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["calibration"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    tensors = {}
    for name, values in squares.items():
        tensors[f"{tensor_name(name)}.in_sum2"] = values[None]
        tensors[f"{tensor_name(name)}.counts"] = torch.ones(1, 1)
    _write(writer, tensors)


def _write(writer: Any, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _run(command: list[str]) -> str:
    """Run the program; what it says of its build. Raises EvaluationError with its last line where it fails."""
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        last = (done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise EvaluationError(f"{OPTION} {command[0]}: {last}")
    found = _BUILD.search(done.stdout)
    return found[0] if found else ""


def _read(path: Path, weights: Mapping[str, Tensor], build: str) -> Quantized:
    """The file's Linears without padding, whose bits count, and how many of them have each type."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    found, stored, kinds = {}, 0, list[str]()
    for name, weight in weights.items():
        tensor = tensors[tensor_name(name)]
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        found[name] = values[:, : weight.shape[1]].contiguous()
        stored += 8 * int(tensor.n_bytes)
        kinds.append(tensor.tensor_type.name)
    types = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return Quantized(found, stored, {"types": types, "build": build})
