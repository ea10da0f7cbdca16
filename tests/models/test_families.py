"""The family table: blocks, Linears and feeds of every row, and what happens beyond it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from quantkit.errors import ModelError
from quantkit.models.families import (
    block_linears,
    chains_of,
    decoder_blocks,
    family_of,
    feeds_of,
    linear_bias,
    linear_shape,
    linear_weight,
)
from tests.tiny import CONFIGS

FP32_LOGIT_ATOL = 1e-4  # two blocks of fp32 matmuls in another scale: about 1e3 roundings of 2^-24

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "head_dim": 8,
}
_OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}

FEED_CONFIGS: dict[str, PretrainedConfig] = {
    "llama-gqa": LlamaConfig(**_SMALL, num_key_value_heads=2),
    "llama-mha": LlamaConfig(**_SMALL, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**_SMALL, num_key_value_heads=2),
    "qwen2": Qwen2Config(**_SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**_SMALL, num_key_value_heads=4),
    "opt": OPTConfig(**_OPT, word_embed_proj_dim=32),
    "opt-norm-after": OPTConfig(**_OPT, word_embed_proj_dim=32, do_layer_norm_before=False),
    "opt-gelu": OPTConfig(**_OPT, word_embed_proj_dim=32, activation_function="gelu"),
    "bloom": BloomConfig(**_BLOOM),
    "bloom-norm-residual": BloomConfig(**_BLOOM, apply_residual_connection_post_layernorm=True),
    "gpt2": CONFIGS["gpt2"],
}

FEED_SOURCES = {
    "llama-gqa": {"input_layernorm", "post_attention_layernorm", "mlp.up_proj"},
    "llama-mha": {"input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"},
    "mistral": {"input_layernorm", "post_attention_layernorm", "mlp.up_proj"},
    "qwen2": {"input_layernorm", "post_attention_layernorm", "mlp.up_proj"},
    "qwen3": {"input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"},
    "opt": {"self_attn_layer_norm", "self_attn.v_proj", "final_layer_norm", "fc1"},
    "opt-norm-after": {"self_attn.v_proj", "fc1"},
    "opt-gelu": {"self_attn_layer_norm", "self_attn.v_proj", "final_layer_norm"},
    "bloom": {"input_layernorm", "post_attention_layernorm"},
    "bloom-norm-residual": set(),
    "gpt2": {"ln_1", "ln_2"},
}


def _build(config: PretrainedConfig) -> nn.Module:
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _randomize(model: nn.Module) -> None:
    """Biases and norm weights start as 0 and 1, which would hide a wrong fold."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def _fold(model: nn.Module) -> None:
    """Divide every feed's source by a random positive scale and multiply its targets' columns by it."""
    with torch.no_grad():
        for _, block in decoder_blocks(model):
            for feed in feeds_of(model):
                source = block.get_submodule(feed.source)
                channels = linear_weight(block.get_submodule(feed.targets[0])).shape[1]
                scale = torch.rand(channels) * 4 + 0.25
                source.weight.div_(scale[:, None] if source.weight.ndim == 2 else scale)
                if getattr(source, "bias", None) is not None:
                    source.bias.div_(scale)
                for target in feed.targets:
                    linear_weight(block.get_submodule(target)).mul_(scale)


@pytest.mark.parametrize("name", FEED_CONFIGS)
def test_feeds_scale_without_changing_the_model(name: str) -> None:
    model = _build(FEED_CONFIGS[name])
    _randomize(model)
    ids = torch.randint(0, 64, (1, 12))
    with torch.no_grad():
        before = model(ids).logits
        _fold(model)
        after = model(ids).logits
    assert {feed.source for feed in feeds_of(model)} == FEED_SOURCES[name]
    torch.testing.assert_close(after, before, atol=FP32_LOGIT_ATOL, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "per_block", "first", "last"),
    [
        ("llama", 7, "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"),
        ("opt", 6, "model.decoder.layers.0.self_attn.k_proj", "model.decoder.layers.1.fc2"),
        ("bloom", 4, "transformer.h.0.self_attention.query_key_value", "transformer.h.1.mlp.dense_4h_to_h"),
        ("gpt2", 4, "transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"),
    ],
    ids=["llama", "opt", "bloom", "gpt2"],
)
def test_block_linears_are_all_linears_of_the_blocks(family: str, per_block: int, first: str, last: str) -> None:
    model = _build(CONFIGS[family])
    names = list(block_linears(model))
    assert family_of(model).name == family
    assert len(names) == 2 * per_block
    assert (names[0], names[-1]) == (first, last)
    assert not any("head" in name for name in names)


def test_conv1d_is_seen_as_rows_by_columns() -> None:
    module = block_linears(_build(CONFIGS["gpt2"]))["transformer.h.0.mlp.c_fc"]
    x = torch.randn(3, 64)
    bias = linear_bias(module)
    assert linear_shape(module) == (256, 64)
    torch.testing.assert_close(nn.functional.linear(x, linear_weight(module), bias), module(x))


def test_unknown_family_is_found_by_structure() -> None:
    config = StableLmConfig(**{**_SMALL, "num_hidden_layers": 3}, num_key_value_heads=4)
    model = _build(config)
    assert family_of(model).blocks == "model.layers"
    assert len(decoder_blocks(model)) == 3
    assert feeds_of(model) == []
    assert len(block_linears(model)) == 3 * 7


def test_longest_stack_wins() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.short = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
            self.long = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))

    assert list(block_linears(Two())) == ["long.0.0", "long.1.0", "long.2.0"]


def test_model_without_blocks_is_refused_with_the_list() -> None:
    with pytest.raises(ModelError, match=r"no stack of decoder blocks.*llama.*opt.*bloom.*gpt2"):
        decoder_blocks(nn.Sequential(nn.Linear(4, 4)))


def test_fused_experts_are_not_passed_over() -> None:
    model = _build(MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts.*separate them"):
        block_linears(model)


def test_a_linear_that_computes_something_else_is_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    stack = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), Doubled(4, 4)) for _ in range(2))
    assert list(block_linears(nn.Sequential(stack))) == ["0.0.0", "0.1.0"]


def test_table_rows_name_modules_that_exist(tiny_model: Callable[[str], Path]) -> None:
    for config in FEED_CONFIGS.values():
        model = _build(config)
        block = decoder_blocks(model)[0][1]
        for feed in family_of(model).feeds:
            for name in (feed.source, *feed.targets):
                block.get_submodule(name)


_WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}

CHAIN_CONFIGS: dict[str, PretrainedConfig] = {
    "opt": CONFIGS["opt"],
    "bloom": CONFIGS["bloom"],
    "gpt2": CONFIGS["gpt2"],
    "gpt-neox": GPTNeoXConfig(**_WIDE),
    "phi": PhiConfig(**_WIDE),
}


@pytest.mark.parametrize("config", CHAIN_CONFIGS.values(), ids=CHAIN_CONFIGS)
def test_chains_are_called_one_after_the_other_by_one_module(config: PretrainedConfig) -> None:
    model = _build(config)
    block, chain = chains_of(model)[0]
    assert len({name.rpartition(".")[0] for name in (chain.source, chain.activation, chain.target)}) == 1
    assert block is decoder_blocks(model)[0][1]
    values = {}
    for name in (chain.source, chain.activation, chain.target):

        def note(module: nn.Module, arguments: tuple[torch.Tensor], result: torch.Tensor, name: str = name) -> None:
            values[name] = arguments[0], result

        block.get_submodule(name).register_forward_hook(note)
    model(torch.arange(10, 20)[None])
    assert values[chain.activation][0] is values[chain.source][1]
    assert values[chain.target][0] is values[chain.activation][1]


def test_blooms_sliced_product_is_no_chain() -> None:
    assert chains_of(_build(BloomConfig(**_BLOOM, pretraining_tp=2, slow_but_exact=True))) == []
    assert chains_of(_build(FEED_CONFIGS["llama-gqa"])) == []
