"""Decoder blocks with fewer kernels: the same bits as transformers' own on a CPU, and which blocks are left alone."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, MistralConfig, OPTConfig, PretrainedConfig, Qwen2Config, Qwen3Config
from transformers.models.llama import modeling_llama

from quantkit.models.families import decoder_blocks
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.runtime import decoder_block
from quantkit.runtime.decoder_block import fused_blocks
from quantkit.runtime.generation import Runner, Session, fused_runner, next_logits, start
from quantkit.runtime.merged_linears import EpilogueProduct
from tests.runtime.test_merged_linears import packed
from tests.tiny import CONFIGS

LOGITS_RTOL = {torch.float16: 2e-2, torch.bfloat16: 1e-1}  # two blocks, norms and attention rounded in other places
MERGED_TOLERANCE = 2e-5  # fp32, two blocks
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 60, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 96, "num_key_value_heads": 2}
COVERED: dict[str, PretrainedConfig] = {
    "llama": CONFIGS["llama"],
    "llama-bias": CONFIGS["llama"].__class__(attention_bias=True, mlp_bias=True, **GATED),
    "mistral": MistralConfig(head_dim=16, **GATED),
    "mistral-window": MistralConfig(head_dim=16, sliding_window=40, **GATED),
    "qwen2": Qwen2Config(**GATED),
    "qwen3": Qwen3Config(head_dim=32, **GATED),  # heads wider than the hidden size together
    "gpt2": CONFIGS["gpt2"],
    "opt": CONFIGS["opt"],
    "opt-gelu": OPTConfig(ffn_dim=96, word_embed_proj_dim=64, activation_function="gelu", **SIZES),
}
FULL_SIZES = {**SIZES, "hidden_size": 256}  # heads of 64: the attention kernel takes them
FULL: dict[str, PretrainedConfig] = {
    "llama": CONFIGS["llama"].__class__(intermediate_size=512, num_key_value_heads=2, **FULL_SIZES),
    "qwen3": Qwen3Config(intermediate_size=512, num_key_value_heads=2, head_dim=64, **FULL_SIZES),
    "opt": OPTConfig(ffn_dim=512, word_embed_proj_dim=256, **FULL_SIZES),
}
METHODS = {"bcq": "bcq-w3-g32", "rotated": "bcq-w3-g32 rotated"}
GPU_METHODS = {"bcq": "bcq-w4-g128", "rotated": "bcq-w4-g128 rotated"}
BETWEEN = ("neg", "cat", "add", "mul", "relu", "silu", "gelu", "copy_", "clone", "native_layer_norm", "_to_copy")


def model_of(config: PretrainedConfig) -> Any:
    """A model whose parameters are all random: norms of ones and biases of zeros would hide what they do."""
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()  # it keeps the type it gets
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def packed_by(model: Any, method: str) -> None:
    """Pack the model's Linears; "rotated" behind the method says that planes are of W Q."""
    name, *rotated = method.split()
    packed(model, name)
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and rotated:
            module.spec = replace(module.spec, rotate_inputs=True)


def advance(session: Session, token: Tensor) -> None:
    session.token.copy_(token)
    session.position.add_(1)


def behind_one_prompt(model: Any, ids: Tensor) -> list[Session]:
    """Sessions that go on with fused blocks and with the model's own code, which has read the prompt for both."""
    runners = fused_runner(model), Runner(model)
    return [replace(start(model, ids, 32, runner=Runner(model)), runner=runner) for runner in runners]


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("method", [None, *METHODS.values()], ids=["float", *METHODS])
@pytest.mark.parametrize("family", COVERED)
def test_prompts_fill_the_cache_as_the_models_own_code_does(
    family: str, method: str | None, length: int, padded: bool
) -> None:
    model = model_of(COVERED[family])
    if method is not None:
        packed_by(model, method)
    ids, runners = torch.randint(5, 50, (3, length)), (fused_runner(model), Runner(model))
    padding = torch.arange(3).clamp(max=length - 1) if padded else None
    fast, plain = (start(model, ids, 32, runner=runner, padding=padding) for runner in runners)
    close = {"rtol": MERGED_TOLERANCE, "atol": MERGED_TOLERANCE}
    for own, other in zip(fast.cache.layers, plain.cache.layers, strict=True):
        assert own.cumulative_length == other.cumulative_length == length
        seen = torch.arange(32) >= (torch.zeros(3) if padding is None else padding)[:, None]
        for got, expected in ((own.keys, other.keys), (own.values, other.values)):
            got, expected = (part[:, :, :32].transpose(1, 2)[seen] for part in (got, expected))
            torch.testing.assert_close(got, expected, **close)
    for session in (fast, plain):
        session.token.copy_(plain.token)
    torch.testing.assert_close(next_logits(fast), next_logits(plain), **close)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", [None, *METHODS.values()], ids=["float", *METHODS])
@pytest.mark.parametrize("family", COVERED)
def test_logits_are_the_models_own_to_the_bit(family: str, method: str | None, batch: int) -> None:
    model = model_of(COVERED[family])
    if method is not None:
        packed_by(model, method)
    # Of several rows a merged product adds in another order than its Linears by themselves.
    close = {"rtol": 0, "atol": 0} if batch == 1 else {"rtol": MERGED_TOLERANCE, "atol": MERGED_TOLERANCE}
    ids = torch.randint(5, 50, (batch, 9))
    fast, plain = behind_one_prompt(model, ids)
    assert fast.runner.layers == (0, 1)
    for _ in range(3):
        expected = next_logits(plain)
        torch.testing.assert_close(next_logits(fast), expected, **close)
        for session in (fast, plain):
            advance(session, expected.argmax(-1, keepdim=True))
    for own, other in zip(fast.cache.layers, plain.cache.layers, strict=True):
        assert own.cumulative_length == other.cumulative_length == 12
        torch.testing.assert_close(own.keys, other.keys, **close)
        torch.testing.assert_close(own.values, other.values, **close)


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt"])
def test_the_classes_own_code_does_not_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(COVERED[family])
    ids, runners = torch.randint(5, 50, (1, 9)), (fused_runner(model), Runner(model))
    session, plain = (start(model, ids, 32, runner=runner) for runner in runners)
    _, block = decoder_blocks(model)[0]
    for kind in (type(block), type(block.self_attn)):
        monkeypatch.setattr(kind, "forward", lambda *_, **__: pytest.fail("transformers' own code"))
    next_logits(session)
    with pytest.raises(pytest.fail.Exception):
        next_logits(plain)


def test_nothing_outside_the_session_is_replaced() -> None:
    model = model_of(CONFIGS["llama"])
    session = start(model, torch.randint(5, 50, (1, 9)), 32, runner=fused_runner(model))
    before = {name: dict(vars(sys.modules[name])) for name in sys.modules if name.startswith("transformers.models.ll")}
    modules, scaling = dict(model.named_modules()), model.model.layers[0].self_attn.scaling
    attention = model.config._attn_implementation
    seen: list[bool] = []
    model.lm_head.register_forward_hook(
        lambda *_: seen.append(
            model.config._attn_implementation == attention
            and not any("forward" in vars(module) for module in modules.values())
            and all(vars(sys.modules[name]) == own for name, own in before.items())
        )
    )
    next_logits(session)
    assert seen == [True]
    assert modeling_llama.apply_rotary_pos_emb is before[modeling_llama.__name__]["apply_rotary_pos_emb"]
    assert {name: id(module) for name, module in model.named_modules()} == {n: id(m) for n, m in modules.items()}
    assert model.model.layers[0].self_attn.scaling is scaling


def blocks_of(config: PretrainedConfig) -> list[decoder_block.FusedBlock]:
    return fused_blocks(model_of(config))


def test_families_whose_blocks_are_not_described_keep_their_own_code() -> None:
    assert blocks_of(CONFIGS["bloom"]) == []


def test_attention_that_also_looks_elsewhere_keeps_its_own_code() -> None:
    assert blocks_of(CONFIGS["gpt2"].__class__(n_embd=64, n_layer=2, n_head=4, add_cross_attention=True)) == []


def test_norms_behind_the_addition_keep_their_own_code() -> None:
    assert blocks_of(OPTConfig(ffn_dim=96, word_embed_proj_dim=64, do_layer_norm_before=False, **SIZES)) == []


def test_norms_without_a_weight_keep_their_own_code() -> None:
    assert blocks_of(OPTConfig(ffn_dim=96, word_embed_proj_dim=64, layer_norm_elementwise_affine=False, **SIZES)) == []


def test_training_keeps_its_own_code() -> None:
    assert fused_blocks(model_of(CONFIGS["opt"]).train()) == []


def test_other_classes_keep_their_own_code() -> None:
    model = model_of(CONFIGS["llama"])
    _, block = decoder_blocks(model)[0]
    block.__class__ = type("LlamaDecoderLayer", (type(block),), {"__module__": "somewhere.else"})
    assert len(fused_blocks(model)) == len(decoder_blocks(model)) - 1


def test_a_block_that_keeps_its_own_code_counts_its_own_tokens() -> None:
    model = model_of(CONFIGS["llama"])
    (_, stranger), _ = decoder_blocks(model)
    stranger.__class__ = type("LlamaDecoderLayer", (type(stranger),), {"__module__": "somewhere.else"})
    ids = torch.randint(5, 50, (1, 9))
    fast, plain = behind_one_prompt(model, ids)
    assert fast.runner.layers == (1,)
    for _ in range(3):
        expected = next_logits(plain)
        assert torch.equal(next_logits(fast), expected)
        for session in (fast, plain):
            advance(session, expected.argmax(-1, keepdim=True))
    assert [int(layer.cumulative_length) for layer in fast.cache.layers] == [12, 12]


def test_watched_blocks_keep_their_own_code() -> None:
    model, seen = model_of(CONFIGS["llama"]), list[int]()
    (_, first), (_, second) = decoder_blocks(model)
    first.mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    second.register_forward_hook(lambda *_: seen.append(2))
    assert [made.block for made in fused_blocks(model)] == [second]
    session = start(model, torch.randint(5, 50, (1, 9)), 32, runner=fused_runner(model))
    seen.clear()
    next_logits(session)
    assert seen == [1, 2]


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
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("method", GPU_METHODS.values(), ids=GPU_METHODS)
@pytest.mark.parametrize("family", FULL)
def test_packed_models_agree_on_a_gpu(family: str, method: str, batch: int, padded: bool, dtype: torch.dtype) -> None:
    model = model_of(FULL[family])
    packed_by(model, method)
    model.to(dtype).cuda()
    ids = torch.randint(5, 50, (batch, 9), device="cuda")
    padding = torch.arange(batch, device="cuda") if padded else None
    fast, plain = (start(model, ids, 32, runner=runner, padding=padding) for runner in (None, Runner(model)))
    assert fast.runner.layers == (0, 1)
    for _ in range(3):
        expected = next_logits(plain)
        got = next_logits(fast)
        assert (got - expected).norm() < LOGITS_RTOL[dtype] * expected.norm()
        for session in (fast, plain):
            advance(session, expected.argmax(-1, keepdim=True))


@pytest.mark.cuda
@pytest.mark.parametrize("method", GPU_METHODS.values(), ids=GPU_METHODS)
@pytest.mark.parametrize("family", FULL)
def test_a_packed_block_has_no_kernels_of_torch_between_its_products(
    family: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(FULL[family])
    packed_by(model, method)
    model.half().cuda()
    seen, forward = Seen(), decoder_block.FusedBlock.forward

    def watched(*args: Any, **options: Any) -> Tensor:
        with seen:
            return forward(*args, **options)

    monkeypatch.setattr(decoder_block.FusedBlock, "forward", watched)
    session = start(model, torch.randint(5, 50, (1, 9), device="cuda"), 32)
    # Norms of heads read rows without gaps, which those of a prompt are not.
    assert seen.names & set(BETWEEN) == ({"clone"} if family == "qwen3" else set())
    seen.names.clear()
    next_logits(session)
    assert seen.names
    assert not seen.names & set(BETWEEN)


@pytest.mark.cuda
@pytest.mark.parametrize("family", FULL)
def test_rows_written_in_a_product_s_order_change_no_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(FULL[family])
    packed_by(model, "bcq-w4-g128")
    model.half().cuda()
    ids, orders = torch.randint(5, 50, (5, 40), device="cuda"), list[object]()
    with monkeypatch.context() as patch:
        patch.setattr(EpilogueProduct, "input_order", lambda *_: None)
        expected = next_logits(start(model, ids, 64))
    asked = EpilogueProduct.input_order

    def noted(*given: Any) -> object:
        orders.append(asked(*given))
        return orders[-1]

    monkeypatch.setattr(EpilogueProduct, "input_order", noted)
    assert torch.equal(next_logits(start(model, ids, 64)), expected)
    assert any(order is not None for order in orders)


def test_a_norm_of_a_class_that_computes_something_else_is_left_alone() -> None:
    class Shifted(nn.LayerNorm):
        """As Nemotron's: the weight is stored less one."""

    model = model_of(CONFIGS["opt"])
    _, block = decoder_blocks(model)[0]
    block.final_layer_norm.__class__ = Shifted
    assert len(fused_blocks(model)) == len(decoder_blocks(model)) - 1
