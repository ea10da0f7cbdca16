"""Blocks that take large batches in chunks: the model's own bits, and whole wherever chunks would be seen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

import quantkit
from quantkit.bench.flatten_layers import random_flatten_linear
from quantkit.cuda.graph import FilledScalars
from quantkit.formats.flatten import FlattenSpec
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.families import block_linears, decoder_blocks, linear_shape
from quantkit.recipe import load_recipe
from quantkit.runtime import batch_chunks
from quantkit.runtime.batch_chunks import chunk_batches
from quantkit.runtime.fused_ffn import fuse_chains
from quantkit.runtime.generation import fused_runner, next_logits, start
from tests.tiny import CONFIGS

GATED: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
GATED |= {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, PretrainedConfig] = {
    "opt": CONFIGS["opt"],
    "llama": CONFIGS["llama"],
    "mistral": MistralConfig(head_dim=16, sliding_window=5, **GATED),
    "qwen2": Qwen2Config(**GATED),
    "qwen3": Qwen3Config(head_dim=16, **GATED),
}
LENGTH, SEQUENCES = 9, 2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_chunks, "CHUNK_TOKENS", SEQUENCES * LENGTH + 1)


def _model(name: str, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), dtype=dtype).eval().to(device)
    for path, linear in block_linears(model).items():
        _, in_features = shape = linear_shape(linear)
        spec = FlattenSpec(8, 8, (in_features + in_features // 4) // 32 * 32 + 32)
        model.set_submodule(path, random_flatten_linear(spec, shape, linear.weight))
    fuse_chains(model)
    chunk_batches(model)
    return model


@pytest.fixture(name="chunks")
def _chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of each call of a decoder block's own code from here on."""
    seen: list[int] = []
    real = batch_chunks._chunk

    def noted(rest: Any, some: slice, batch: int) -> Any:
        if isinstance(rest, tuple) and len(rest) == 2 and isinstance(rest[1], dict):
            seen.append(min(some.stop, batch) - some.start)
        return real(rest, some, batch)

    monkeypatch.setattr(batch_chunks, "_chunk", noted)
    return seen


def _whole(model: Any) -> Any:
    """A copy whose blocks run their classes' code."""
    plain = copy.deepcopy(model)
    for _, block in decoder_blocks(plain):
        del block.forward
    return plain


def _ids(batch: int, device: torch.device = CPU) -> Tensor:
    return torch.randint(10, 300, (batch, LENGTH), device=device)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_batch_in_chunks_gives_the_bits_of_the_whole(
    device: torch.device, name: str, padded: bool, chunks: list[int]
) -> None:
    model = _model(name, device)
    plain = _whole(model)
    for batch, expected in ((1, []), (2, []), (3, [2, 1] * 2), (6, [2, 2, 2] * 2)):
        ids = _ids(batch, device)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, :4] = 0
        chunks.clear()
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        assert chunks == expected
        assert torch.equal(logits, plain(ids, attention_mask=mask, use_cache=False).logits)


@torch.no_grad()
def test_positions_of_every_sequence_go_with_it(chunks: list[int]) -> None:
    model = _model("llama")
    ids, positions = _ids(3), torch.randint(0, 40, (3, LENGTH))
    expected = _whole(model)(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, expected)
    assert chunks == [2, 1] * 2


@torch.no_grad()
def test_a_sequence_longer_than_a_chunk_is_one(chunks: list[int]) -> None:
    model, ids = _model("opt"), torch.randint(10, 300, (3, 3 * LENGTH))
    assert torch.equal(model(ids, use_cache=False).logits, _whole(model)(ids, use_cache=False).logits)
    assert chunks == [1, 1, 1] * 2


def _hook(model: Any) -> None:
    for _, block in decoder_blocks(model):
        block.self_attn.register_forward_hook(lambda module, inputs, output: None)


def _stand_in(model: Any) -> None:
    for _, block in decoder_blocks(model):
        block.self_attn.forward = block.self_attn.forward


@pytest.mark.parametrize("watch", [_hook, _stand_in], ids=["hooked", "replaced-forward"])
@torch.no_grad()
def test_modules_that_are_watched_see_the_whole_batch(watch: Callable[[Any], None], chunks: list[int]) -> None:
    model, ids = _model("opt"), _ids(5)
    expected = model(ids, use_cache=False).logits
    chunks.clear()
    watch(model)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert chunks == []


@torch.no_grad()
def test_cached_keys_are_those_of_the_whole_batch(chunks: list[int]) -> None:
    model, ids = _model("llama"), _ids(5)
    cache = model(ids, use_cache=True).past_key_values
    assert chunks == []
    assert cache.layers[0].keys.shape[0] == 5
    expected = model(torch.cat((ids, ids[:, :1]), 1), use_cache=False).logits[:, -1]
    apart = model(ids[:, :1], past_key_values=cache).logits[:, -1] - expected
    assert apart.norm() <= 0.1 * expected.norm()  # another attention function of torch in bf16


@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_whole_batches() -> None:
    model, ids = _model("opt"), _ids(5)
    model.set_attn_implementation("eager")
    plain, asked = _whole(model), {"output_hidden_states": True, "output_attentions": True}
    result, expected = model(ids, use_cache=False, **asked), plain(ids, use_cache=False, **asked)
    for name in ("hidden_states", "attentions"):
        for own, other in zip(result[name], expected[name], strict=True):
            assert torch.equal(own, other)


@torch.no_grad()
def test_compiled_models_run_whole(chunks: list[int]) -> None:
    model, ids = _model("opt"), _ids(5)
    expected = _whole(model)(ids, use_cache=False).logits
    assert torch.equal(torch.compile(model, backend="eager")(ids, use_cache=False).logits, expected)
    assert chunks == []


def test_gradients_are_those_of_the_whole() -> None:
    ids, sums = _ids(3), []
    model = _model("opt", dtype=torch.float32)
    for which in (model, _whole(model)):
        which.model.decoder.final_layer_norm.requires_grad_(True)
        which(ids, use_cache=False).logits.sum().backward()
        sums.append(which.model.decoder.final_layer_norm.weight.grad)
    assert torch.equal(*sums)


@torch.no_grad()
def test_decoding_leaves_the_chunks_in_place(chunks: list[int]) -> None:
    model, ids = _model("opt"), _ids(1)
    next_logits(start(model, ids, 32, runner=fused_runner(model)))
    model(_ids(3), use_cache=False)
    assert chunks == [2, 1] * 2


@torch.no_grad()
def test_copies_have_chunks_of_their_own(chunks: list[int]) -> None:
    model, ids = _model("opt"), _ids(3)
    twin, expected = copy.deepcopy(model), model(ids, use_cache=False).logits
    for _, block in decoder_blocks(model):
        del block.fc1
    del model
    chunks.clear()
    assert torch.equal(twin(ids, use_cache=False).logits, expected)
    assert chunks == [2, 1] * 2


def test_chunking_again_changes_nothing() -> None:
    model = _model("opt")
    before = [block.forward for _, block in decoder_blocks(model)]
    chunk_batches(model)
    assert [block.forward for _, block in decoder_blocks(model)] == before


def test_blocks_of_other_formats_or_families_are_left_alone() -> None:
    models: list[nn.Module] = [AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])) for name in CONFIGS]
    for model in models:
        chunk_batches(model)
        assert not any("forward" in vars(module) for module in model.modules())


def test_blocks_that_only_share_a_name_are_left_alone() -> None:
    model = _whole(_model("llama"))
    (_, stranger), (_, known) = decoder_blocks(model)
    stranger.__class__ = type("LlamaDecoderLayer", (type(stranger),), {"__module__": "somewhere.else"})
    chunk_batches(model)
    assert ["forward" in vars(block) for block in (stranger, known)] == [False, True]


@pytest.mark.parametrize(("recipe", "split"), [("flatten-o1", True), ("bcq-w4-g128", False)])
@torch.no_grad()
def test_checkpoints_load_so(
    recipe: str,
    split: bool,
    tiny_model: Callable[[str], Path],
    calibrated: Callable[[str], Path],
    tmp_path: Path,
    chunks: list[int],
) -> None:
    source, calibration = str(tiny_model("opt")), calibrated("opt") if split else None
    quantize_model(
        source, load_recipe(recipe), tmp_path, calibration=calibration, options=QuantizeOptions(overwrite=True)
    )
    model, ids = quantkit.load(str(tmp_path), device="cpu", dtype=torch.float32), _ids(3)
    logits = model(ids, use_cache=False).logits
    assert chunks == ([2, 1] * len(decoder_blocks(model)) if split else [])
    single = [model(one[None], use_cache=False).logits[0] for one in ids]
    torch.testing.assert_close(logits, torch.stack(single), rtol=1e-4, atol=1e-4)  # sums of torch in another order


@pytest.mark.cuda
@torch.no_grad()
def test_a_captured_pass_gives_the_same_bits(chunks: list[int]) -> None:
    model, ids = _model("opt", torch.device("cuda"), torch.float16), _ids(5, torch.device("cuda"))
    expected = model(ids, use_cache=False).logits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), FilledScalars():
        captured = model(ids, use_cache=False).logits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    assert chunks == [2, 2, 1] * 4


@pytest.mark.cuda
@torch.no_grad()
def test_a_block_needs_the_memory_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(CONFIGS["opt"])
    config.hidden_size = config.word_embed_proj_dim = 1024
    config.ffn_dim, config.max_position_embeddings = 4096, 512
    monkeypatch.setitem(MODELS, "opt", config)
    monkeypatch.setattr(batch_chunks, "CHUNK_TOKENS", 4096)
    batch, length, device = 64, 512, torch.device("cuda")
    model = _model("opt", device, torch.float16)
    body, tensor = model.model, batch * length * 1024 * 2
    ids = torch.randint(10, 300, (batch, length), device=device)
    peaks = []
    for which in (body, _whole(model).model):
        torch.cuda.empty_cache()
        start_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        which(ids, use_cache=False)
        peaks.append((torch.cuda.max_memory_allocated() - start_bytes) / tensor)
    assert peaks[0] < 6  # two embeddings, input, result, and an eighth of what a block makes
    assert peaks[1] > 8
