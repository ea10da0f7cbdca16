"""Decoder blocks with fewer kernels: the same bits as transformers' own on a CPU, and which blocks are left alone."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MistralConfig, OPTConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.cache_utils import StaticSlidingWindowLayer

from quantkit.errors import BenchError
from quantkit.models.families import decoder_blocks
from quantkit.runtime.decoder_block import fast_blocks
from quantkit.runtime.fast_step import Parts, replaced_parts
from quantkit.runtime.generation import Session, next_logits, start
from quantkit.runtime.merged_linears import join_siblings
from tests.runtime.test_merged_linears import packed
from tests.tiny import CONFIGS

LOGITS_RTOL = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # two blocks, norms and attention rounded in other places
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 60, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
COVERED: dict[str, PretrainedConfig] = {
    "llama": CONFIGS["llama"],
    "mistral": MistralConfig(head_dim=16, **GATED),
    "mistral-window": MistralConfig(head_dim=16, sliding_window=40, **GATED),
    "qwen2": Qwen2Config(**GATED),
    "qwen3": Qwen3Config(head_dim=16, **GATED),
    "opt": CONFIGS["opt"],
    "opt-gelu": OPTConfig(ffn_dim=96, word_embed_proj_dim=64, activation_function="gelu", **SIZES),
}
FULL_SIZES = {**SIZES, "hidden_size": 256}  # heads of 64: the attention kernel takes them
FULL: dict[str, PretrainedConfig] = {
    "llama": CONFIGS["llama"].__class__(intermediate_size=512, num_key_value_heads=2, **FULL_SIZES),
    "opt": OPTConfig(ffn_dim=512, word_embed_proj_dim=256, **FULL_SIZES),
}
BETWEEN = ("neg", "cat", "add", "mul", "relu", "silu", "gelu", "copy_", "clone", "native_layer_norm", "_to_copy")


def model_of(config: PretrainedConfig) -> Any:
    return AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()  # it keeps the type it gets


def advance(session: Session, token: Tensor) -> None:
    session.token.copy_(token)
    session.position.add_(1)


def rotation_of(model: Any) -> Any:
    """The function by which the model's attentions turn queries and keys, or None."""
    return getattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", None)


@pytest.mark.parametrize("method", [None, "bcq-w3-g32"], ids=["float", "bcq"])
@pytest.mark.parametrize("family", COVERED)
def test_logits_are_the_models_own_to_the_bit(family: str, method: str | None) -> None:
    model = model_of(COVERED[family])
    if method is not None:
        packed(model, method)
    own_rotation = rotation_of(model)
    parts = Parts(join_siblings(model), fast_blocks(model))
    assert len(parts.blocks) == len(decoder_blocks(model))
    ids = torch.randint(5, 50, (1, 9))
    fast, plain = start(model, ids, 32), start(model, ids, 32)
    for _ in range(3):
        expected = next_logits(plain)
        with replaced_parts(model, fast.cache, fast.position, parts):
            assert torch.equal(next_logits(fast), expected)
        for session in (fast, plain):
            advance(session, expected.argmax(-1, keepdim=True))
    assert not any("forward" in vars(module) for module in model.modules())
    assert rotation_of(model) is own_rotation
    assert all(isinstance(block.attention.scaling, float) for block in parts.blocks)


def test_rotations_are_left_to_the_attention_where_it_writes_every_key() -> None:
    model = model_of(CONFIGS["llama"])
    session, own_rotation = start(model, torch.randint(5, 50, (1, 9)), 32), rotation_of(model)
    parts = Parts((), fast_blocks(model))
    with replaced_parts(model, session.cache, session.position, parts):
        assert rotation_of(model) is not own_rotation
    session.cache.layers[0] = StaticSlidingWindowLayer(max_cache_len=64, sliding_window=64)
    with replaced_parts(model, session.cache, session.position, parts):
        assert rotation_of(model) is own_rotation


def test_an_attention_that_leaves_its_rotation_undone_is_an_error() -> None:
    model = model_of(CONFIGS["llama"])
    session = start(model, torch.randint(5, 50, (1, 9)), 32)
    parts = Parts((), fast_blocks(model))
    with (
        pytest.raises(BenchError, match="does not take its keys"),
        replaced_parts(model, session.cache, session.position, parts),
    ):
        rotation_of(model)(*torch.zeros(4, 1, 1, 1, 16).unbind())


@pytest.mark.parametrize("family", ["bloom", "gpt2"])
def test_families_without_a_row_keep_their_own_code(family: str) -> None:
    assert fast_blocks(model_of(CONFIGS[family])) == ()


def test_norms_behind_the_addition_keep_their_own_code() -> None:
    config = OPTConfig(ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=False, **SIZES)
    assert fast_blocks(model_of(config)) == ()


def test_training_keeps_its_own_code() -> None:
    assert fast_blocks(model_of(CONFIGS["opt"]).train()) == ()


def test_other_classes_keep_their_own_code() -> None:
    model = model_of(CONFIGS["llama"])
    _, block = decoder_blocks(model)[0]
    block.__class__ = type("LlamaDecoderLayer", (type(block),), {"__module__": "somewhere.else"})
    assert len(fast_blocks(model)) == len(decoder_blocks(model)) - 1


def test_an_attention_without_its_last_linear_is_an_error() -> None:
    model = model_of(CONFIGS["opt"])
    packed(model, "bcq-w3-g32")
    block = fast_blocks(model)[0]
    block.attention.forward = lambda hidden_states: (hidden_states, None)
    with pytest.raises(BenchError, match=r"did not call self_attn\.out_proj"):
        block.forward(torch.randn(1, 1, 64))


class Seen(TorchDispatchMode):
    """Names of the torch ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", FULL)
def test_packed_models_agree_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    model = model_of(FULL[family])
    packed(model, "bcq-w4-g128")
    model.to(dtype).cuda()
    ids = torch.randint(5, 50, (1, 9), device="cuda")
    fast, plain = start(model, ids, 32), start(model, ids, 32)
    assert len(fast.parts.blocks) == len(decoder_blocks(model))
    for _ in range(3):
        expected = next_logits(plain, fast=False)
        got = next_logits(fast)
        assert (got - expected).norm() < LOGITS_RTOL[dtype] * expected.norm()
        for session in (fast, plain):
            advance(session, expected.argmax(-1, keepdim=True))


@pytest.mark.cuda
@pytest.mark.parametrize("family", FULL)
def test_a_packed_block_has_no_kernels_of_torch_between_its_products(family: str) -> None:
    model = model_of(FULL[family])
    packed(model, "bcq-w4-g128")
    model.half().cuda()
    session = start(model, torch.randint(5, 50, (1, 9), device="cuda"), 32)
    seen = Seen()
    block = session.parts.blocks[0]
    watched = block.forward

    def forward(*args: Any, **options: Any) -> Tensor:
        with seen:
            return watched(*args, **options)

    block.forward = forward  # type: ignore[method-assign]
    next_logits(session)
    assert seen.names
    assert not seen.names & set(BETWEEN)
