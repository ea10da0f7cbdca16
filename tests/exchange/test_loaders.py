"""Exports through the packages that own the formats; each test is skipped where its package is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.jobs.convert import convert_model
from quantkit.jobs.export import export_model
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.pipeline import quantize_tiny

Model = Callable[[str], Path]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model = quantkit.load(str(folder))
    return {name: m.dequantize() for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_computes_our_weights(tiny_model: Model, tmp_path: Path, bits: int) -> None:
    """By its own compressor, in fp16: our weights, rounded once."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128", "zero=integer", f"weight_bits={bits}")
    export_model(tmp_path / "rtn", tmp_path / "out", to="compressed-tensors", exact=True)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    weights: dict[str, Any] = {"num_bits": bits, "symmetric": False, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    for name, own in _weights(tmp_path / "rtn").items():
        fields = {field: stored[f"{name}.{field}"] for field in ("weight_packed", "weight_scale", "weight_shape")}
        fields["weight_zero_point"] = stored[f"{name}.weight_zero_point"]
        assert torch.equal(PackedQuantizationCompressor.decompress(fields, scheme)["weight"], own.half()), name


@pytest.mark.slow
def test_transformers_loads_a_compressed_tensors_export(tiny_model: Model, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128", "zero=integer")
    export_model(tmp_path / "rtn", tmp_path / "out", to="compressed-tensors", exact=True)
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    for name, own in _weights(tmp_path / "rtn").items():
        assert torch.equal(other.get_submodule(name).weight.half(), own.half()), name  # fp16 or fp32, by its version


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptqmodel_computes_our_weights(tiny_model: Model, tmp_path: Path, bits: int) -> None:
    pytest.importorskip("gptqmodel")
    pytest.importorskip("optimum")
    from transformers import GPTQConfig

    quantize_tiny(tiny_model("opt"), tmp_path / "rtn", "rtn-w4-g128", "zero=integer", f"weight_bits={bits}")
    export_model(tmp_path / "rtn", tmp_path / "out", to="gptq", exact=True)
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, quantization_config=GPTQConfig(bits=bits, backend="torch")
    )
    for name, own in _weights(tmp_path / "rtn").items():
        found = other.get_submodule(name).dequantize_weight().t().float()
        assert torch.equal(found.half(), own.half()), name


def write_gguf(path: Path, kind: str) -> None:
    """A Llama of two layers whose Linears and embedding are random blocks of one type."""
    import gguf
    import numpy as np

    from tests.exchange.test_gguf_blocks import random_blocks

    hidden, ffn, vocabulary, heads = 256, 512, 64, 4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(2)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<|endoftext|>", "!!", '""', *(chr(33 + i) for i in range(vocabulary - 3))])
    writer.add_token_types([3, *[1] * (vocabulary - 1)])
    writer.add_token_merges(["! !", '" "'])  # a single one is taken apart by transformers 5.17
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(0)
    block = gguf.GGMLQuantizationType[kind]

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, random_blocks(kind, rows, columns, rng), raw_dtype=block)

    add("token_embd.weight", vocabulary, hidden)
    for layer in range(2):
        for name, rows, columns in (
            *(("attn_q", hidden, hidden), ("attn_k", hidden // 2, hidden), ("attn_v", hidden // 2, hidden)),
            *(("attn_output", hidden, hidden), ("ffn_gate", ffn, hidden), ("ffn_up", ffn, hidden)),
            ("ffn_down", hidden, ffn),
        ):
            add(f"blk.{layer}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(hidden, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_a_gguf_file_is_what_transformers_makes_of_it(tmp_path: Path, kind: str) -> None:
    """Names, the order of rows of q and k, the embedding, the tokenizer; fp32 on both sides."""
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, kind)
    exact = not kind.endswith("K")
    result = convert_model(path, tmp_path / "out", exact=exact)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    found = quantkit.load(str(tmp_path / "out"), dtype=torch.float32)
    assert result.layers == 14
    for name, parameter in other.named_parameters():
        module = found.get_submodule(name.rpartition(".")[0])
        own = module.dequantize() if isinstance(module, QuantizedLinear) else module.weight
        if exact or not isinstance(module, QuantizedLinear):
            assert torch.equal(own, parameter), name
        else:
            assert ((own - parameter).abs().max() / parameter.abs().max()).item() <= result.rounding, name
