"""``quant_method: quantkit`` for vLLM: which method each of its layers takes, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from quantkit.checkpoint.config import QUANT_METHOD, StoredLayer, config_from_json
from quantkit.checkpoint.read import check_tensors, read_document, read_headers, start_verifying, weight_files
from quantkit.cuda.architectures import ARCHITECTURES
from quantkit.errors import CheckpointError
from quantkit.integrations.vllm import between  # noqa: F401  # registers where it defines its classes
from quantkit.integrations.vllm.experts import QuantkitExpertsMethod
from quantkit.integrations.vllm.linear import QuantkitHeadMethod, QuantkitLinearMethod
from quantkit.storage.tensors import verifies

_BLOCK = re.compile(r"^(.*?\.\d+)\.")
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


@register_quantization_config(QUANT_METHOD)
class QuantkitConfig(QuantizationConfig):
    """The plan of a checkpoint, by vLLM's names of its layers."""

    def __init__(self, document: Mapping[str, Any]):
        super().__init__()
        config = config_from_json(document)
        if config.attention:
            raise CheckpointError(
                "the checkpoint computes attention in INT8 (attention_bits: 8), which vLLM's attention does not; "
                "quantize again without attention_bits"
            )
        if config.prefix is not None:
            raise CheckpointError(
                "the checkpoint has a key/value prefix (prefix: auto), which vLLM's cache does not take; "
                "quantize again without a prefix"
            )
        self.layers: dict[str, StoredLayer] = dict(config.layers)
        self.placed: set[str] = set()
        self.all_placed = False

    @classmethod
    def get_name(cls) -> str:
        """By which config.json asks for this."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Types of activations that the ops take."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU with kernels, as vLLM counts: 80 for 8.0."""
        major, minor = min(ARCHITECTURES)
        return 10 * major + minor

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantkitConfig:
        """The quantization_config of config.json. Raises CheckpointError for one that is malformed or not served."""
        return cls(config)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check a local folder's files before the engine starts; nothing is updated."""
        folder = Path(model_name)
        if any((folder / name).is_file() for name in _WEIGHTS):
            _check_folder(folder)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Take vLLM's names for the layers."""
        self.layers = hf_to_vllm_mapper.apply_dict(self.layers)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer: ours, vLLM's own for a floating-point Linear, None for what is no Linear.

        Raises CheckpointError for a quantized layer of a kind that has no method here.
        """
        if isinstance(layer, ParallelLMHead) and prefix in self.layers:
            self.placed.add(prefix)
            return QuantkitHeadMethod(self, [prefix], [self.layers[prefix]])
        inside = {name for name in self.layers if name.startswith(f"{prefix}.")}
        if isinstance(layer, RoutedExperts) and inside:
            self.placed |= inside
            return QuantkitExpertsMethod(self, prefix, layer.moe_config)
        if not isinstance(layer, LinearBase):
            if prefix in self.layers or inside:
                raise CheckpointError(
                    f"{prefix}: is quantized, and vLLM runs it as {type(layer).__name__}, which quantkit does not "
                    "serve; keep it in floating point"
                )
            return None
        names = self._stored_names(prefix)
        stored = [self.layers.get(name) for name in names]
        if all(part is None for part in stored):
            return UnquantizedLinearMethod()
        self.placed |= {name for name, part in zip(names, stored, strict=True) if part is not None}
        return QuantkitLinearMethod(self, names, stored)

    def check_all_placed(self) -> None:
        """Raise CheckpointError where a layer of the checkpoint has no place in vLLM's model.

        Called once all layers are built. With pipeline parallelism the blocks of other stages are left out.
        """
        if self.all_placed:
            return
        staged = get_current_vllm_config().parallel_config.pipeline_parallel_size > 1
        blocks = {_block(name) for name in self.placed}
        for name in self.layers:
            if name not in self.placed and not (staged and _block(name) not in blocks):
                raise CheckpointError(
                    f"{name}: quantization_config names this layer, and vLLM's model has none of that name; "
                    "this model is not supported"
                )
        self.all_placed = True

    def _stored_names(self, prefix: str) -> list[str]:
        """The Linears behind a vLLM layer: itself, or those that vLLM fuses in it."""
        if prefix in self.layers:
            return [prefix]
        head, dot, tail = prefix.rpartition(".")
        return [f"{head}{dot}{name}" for name in self.packed_modules_mapping.get(tail, [tail])]


def _block(name: str) -> str:
    """The decoder block that a layer belongs to, "" where it is in none."""
    found = _BLOCK.match(name)
    return found[1] if found else ""


@cache
def _check_folder(folder: Path) -> None:
    """Compare the files with quantization_config, and every tensor with its digest, once in a process.

    Raises CheckpointError for a folder that is damaged.
    """
    document = read_document(folder)
    files = read_headers(weight_files(folder))
    check_tensors(config_from_json(document), files)
    if verifies():
        start_verifying(files, document).finish()
