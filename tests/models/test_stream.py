"""A model read part by part from its files: the tensors of from_pretrained, and never two parts at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from quantkit.errors import ModelError
from quantkit.models.experts import separate_experts
from quantkit.models.families import block_linears, decoder_blocks
from quantkit.models.loading import fingerprint, load_model, open_stream, stream_fingerprint
from quantkit.models.stream import in_memory_stream
from quantkit.models.streaming import advance, capture_inputs
from tests.models.test_streaming import FINAL_NORM
from tests.tiny import EXPERTS, VOCABULARY

TinyModel = Callable[[str], Path]


def _same_tensors(folder: Path) -> None:
    stream, _ = open_stream(str(folder))
    whole = load_model(str(folder))[0].state_dict()
    seen: set[str] = set()
    for prefix in stream.parts():
        for name, tensor in stream.part_tensors(prefix).items():
            assert torch.equal(tensor, whole[name]), name
            seen.add(name)
        others = {stream.owner(name) for name, one in stream.model.named_parameters() if not one.is_meta}
        assert others == {prefix}
    assert seen == whole.keys()
    assert all(parameter.is_meta for parameter in stream.model.parameters())


@pytest.mark.parametrize("family", FINAL_NORM)
def test_parts_hold_the_tensors_of_the_model_one_after_the_other(family: str, tiny_model: TinyModel) -> None:
    _same_tensors(tiny_model(family))


def test_shards_and_names_without_the_base_models_prefix_are_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("opt"), tmp_path / "m"))
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, own in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _same_tensors(folder)


def test_pickled_weights_are_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("gpt2"), tmp_path / "m"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    _same_tensors(folder)


def test_one_weight_by_two_names_stays_one(tiny_model: TinyModel) -> None:
    stream, _ = open_stream(str(tiny_model("llama")))
    for _ in range(2):
        with stream.outside():
            assert stream.model.lm_head.weight is stream.model.model.embed_tokens.weight
            with stream.block(0):
                pass
            assert not stream.model.lm_head.weight.is_meta
        assert stream.model.lm_head.weight is stream.model.model.embed_tokens.weight


def test_a_weight_of_two_blocks_is_refused(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantkit.models import stream as module

    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(module, "_ties", lambda model: [[first, second]])
    with pytest.raises(ModelError, match="one weight in two decoder blocks"):
        open_stream(str(tiny_model("llama")))


def test_fingerprint_is_that_of_the_whole_model(tiny_model: TinyModel) -> None:
    folder = str(tiny_model("llama"))
    assert stream_fingerprint(open_stream(folder)[0]) == fingerprint(load_model(folder)[0])


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_separated_as_their_block_is_read(family: str, tiny_model: TinyModel) -> None:
    folder = str(tiny_model(family))
    stream, whole = open_stream(folder)[0], load_model(folder)[0]
    separate_experts(whole)
    linears = block_linears(stream.model)
    assert linears.keys() == block_linears(whole).keys()
    for _ in range(2):
        for index, (prefix, expected) in enumerate(decoder_blocks(whole)):
            with stream.block(index) as block:
                found = block.state_dict()
                assert found.keys() == expected.state_dict().keys()
                assert all(torch.equal(found[name], tensor) for name, tensor in expected.state_dict().items())
                held = {stream.owner(name) for name, one in stream.model.named_parameters() if not one.is_meta}
                assert held == {prefix}
    assert block_linears(stream.model) == linears  # the same modules: what watches them goes on to
    assert stream_fingerprint(stream) == fingerprint(whole)


def test_buffers_that_no_file_holds_are_computed(tmp_path: Path) -> None:
    """Gemma 3 has two rotary tables and the embedding's scale in buffers; every block is called with its own mask."""
    config = Gemma3TextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    from quantkit.models.stream import ModelStream, WeightReader, restore_buffers

    empty = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, device_map="meta")
    restore_buffers(empty, torch.device("cpu"))
    stream = ModelStream(empty, torch.device("cpu"), WeightReader(empty, tmp_path))
    windows = torch.randint(0, VOCABULARY, (2, 12), dtype=torch.int32)
    found, expected = capture_inputs(stream, windows), capture_inputs(in_memory_stream(whole), windows)
    assert torch.equal(found.hidden, expected.hidden)
    for index, (_, block) in enumerate(in_memory_stream(whole).blocks):
        with stream.block(index) as own:
            found = advance(own, found, index)
        expected = advance(block, expected, index)
        assert torch.equal(found.hidden, expected.hidden)


def test_hidden_states_in_bf16_are_computed_with_in_fp32(tiny_model: TinyModel) -> None:
    stream, _ = open_stream(str(tiny_model("llama")))
    windows = torch.randint(0, VOCABULARY, (2, 12), dtype=torch.int32)
    full = capture_inputs(stream, windows)
    half = capture_inputs(stream, windows, dtype=torch.bfloat16)
    assert (half.hidden.dtype, half.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(half.hidden, full.hidden.bfloat16())
    with stream.block(0) as block:
        found = advance(block, half, 0)
    assert torch.isfinite(found.hidden.float()).all()
