"""Block-by-block runs against the model's own forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from quantkit.errors import ModelError
from quantkit.models import block_calls
from quantkit.models.experts import RoutedExperts, expert_linears, separate_experts
from quantkit.models.families import block_linears, decoder_blocks
from quantkit.models.hessians import Weighing, block_hessians
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.models.streaming import advance, capture_inputs
from quantkit.stats import trust
from tests.tiny import VOCABULARY, build_model

FINAL_NORM = {
    "llama": "model.norm",
    "opt": "model.decoder.final_layer_norm",
    "bloom": "transformer.ln_f",
    "gpt2": "transformer.ln_f",
}
SUM_RTOL = 1e-4  # fp32 sums over 72 rows in another order
BATCH_RTOL = 1e-4  # fp32 products of other shapes, through up to four blocks


def _windows(count: int = 3) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, 24), dtype=torch.int32)


def _logits_by_blocks(model: nn.Module, windows: torch.Tensor, norm: str) -> torch.Tensor:
    inputs = capture_inputs(in_memory_stream(model), windows)
    for index, (_, block) in enumerate(decoder_blocks(model)):
        inputs = advance(block, inputs, index)
    with torch.no_grad():
        rows = [model.lm_head(model.get_submodule(norm)(hidden)) for hidden in inputs.hidden.split(1)]
    return torch.cat(rows)


@pytest.mark.parametrize("family", FINAL_NORM)
def test_blocks_in_a_row_equal_the_model(family: str, tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model(family)))
    windows = _windows()
    with torch.no_grad():
        whole = torch.cat([model(window.long(), use_cache=False).logits for window in windows.split(1)])
    assert torch.equal(_logits_by_blocks(model, windows, FINAL_NORM[family]), whole)


def test_blocks_with_different_masks_equal_the_model() -> None:
    """Sliding and full attention alternate: every block must be called with its own mask and rotary table."""
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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    windows = _windows()
    with torch.no_grad():
        whole = torch.cat([model(window.long(), use_cache=False).logits for window in windows.split(1)])
    assert torch.equal(_logits_by_blocks(model, windows, "model.norm"), whole)


@pytest.mark.parametrize(
    "family",
    ["llama", "opt", "bloom", "gpt2", "gemma3", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4", "lfm2", "jamba"],
)
def test_windows_at_once_give_what_they_give_one_by_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = build_model(family).eval(), _windows(7)
    stream = in_memory_stream(model)
    alone = capture_inputs(stream, windows)
    assert alone.batches(7) == [1] * 7
    monkeypatch.setattr(block_calls, "_TOKENS_AT_ONCE", {"cpu": 4 * windows.shape[1]})
    together = capture_inputs(stream, windows)
    assert together.batches(7) == [4, 2, 1]
    for index, (_, block) in enumerate(stream.blocks):
        alone, together = advance(block, alone, index), advance(block, together, index)
    torch.testing.assert_close(together.hidden, alone.hidden, rtol=BATCH_RTOL, atol=BATCH_RTOL)


@pytest.mark.parametrize("family", [*FINAL_NORM, "qwen3_moe", "gpt_oss", "llama4"])
def test_hessians_of_windows_at_once_are_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = build_model(family).eval(), _windows(7)
    separate_experts(model)
    experts, blocks = expert_linears(model), decoder_blocks(model)
    index = next((i for i, (name, _) in enumerate(blocks) if any(key.startswith(f"{name}.") for key in experts)), 0)
    name, block = blocks[index]
    linears = {key: module for key, module in block_linears(model).items() if key.startswith(f"{name}.")}
    saliency = {key: torch.rand(*windows.shape, 2) for key in list(linears)[1:] if key not in experts}
    weighing = Weighing(experts=experts, saliency=saliency)

    def found() -> dict[str, torch.Tensor]:
        return block_hessians(block, capture_inputs(in_memory_stream(model), windows), index, linears, weighing)

    alone = found()
    monkeypatch.setattr(block_calls, "_TOKENS_AT_ONCE", {"cpu": 4 * windows.shape[1]})
    for key, hessian in found().items():
        torch.testing.assert_close(hessian, alone[key], rtol=SUM_RTOL, atol=1e-6)


@pytest.mark.parametrize("family", FINAL_NORM)
def test_hessians_are_the_mean_outer_product(family: str, tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model(family)))
    windows = _windows()
    name, block = decoder_blocks(model)[0]
    linears = {key: module for key, module in block_linears(model).items() if key.startswith(f"{name}.")}
    hessians = block_hessians(block, capture_inputs(in_memory_stream(model), windows), 0, linears)
    seen: dict[str, list[torch.Tensor]] = {key: [] for key in linears}
    for key, module in linears.items():
        module.register_forward_pre_hook(
            lambda _, args, key=key: seen[key].append(args[0].reshape(-1, args[0].shape[-1]))
        )
    with torch.no_grad():
        for window in windows.split(1):
            model(window.long(), use_cache=False)
    for key in linears:
        x = torch.cat(seen[key]).double()
        torch.testing.assert_close(hessians[key].double(), x.t() @ x / len(x), rtol=SUM_RTOL, atol=1e-6)


def test_linears_with_one_input_share_one_hessian(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    name, block = decoder_blocks(model)[1]
    linears = {key: module for key, module in block_linears(model).items() if key.startswith(f"{name}.")}
    inputs = advance(decoder_blocks(model)[0][1], capture_inputs(in_memory_stream(model), _windows()), 0)
    hessians = block_hessians(block, inputs, 1, linears)
    assert hessians[f"{name}.self_attn.q_proj"] is hessians[f"{name}.self_attn.v_proj"]
    assert hessians[f"{name}.mlp.gate_proj"] is hessians[f"{name}.mlp.up_proj"]
    assert len({id(tensor) for tensor in hessians.values()}) == 4


def test_a_change_in_one_block_reaches_the_next(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("opt")))
    windows = _windows(1)
    block = decoder_blocks(model)[0][1]
    before = advance(block, capture_inputs(in_memory_stream(model), windows), 0).hidden.clone()
    with torch.no_grad():
        block.fc2.weight.zero_()
    assert not torch.equal(advance(block, capture_inputs(in_memory_stream(model), windows), 0).hidden, before)


def test_blocks_that_are_no_chain_are_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden_states)

    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            x = self.embed(ids)
            return self.blocks[0](x) + self.blocks[1](x.clone())

    with pytest.raises(ModelError, match="block 1 is not fed by the block before it"):
        capture_inputs(in_memory_stream(Forked()), torch.zeros(1, 3, dtype=torch.int32))


def test_blocks_that_are_handed_what_depends_on_the_text_are_refused() -> None:
    """Gemma 3n hands every block an embedding of the tokens; the calls of one window are no other's."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden_states: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
            return self.linear(hidden_states) + extra

    class PerLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
            x = extra = self.embed(ids)
            for block in self.blocks:
                x = block(x, extra=extra)
            return x

    with pytest.raises(ModelError, match="block 0 something that depends on the text"):
        capture_inputs(in_memory_stream(PerLayer()), torch.tensor([[1, 2, 3], [4, 5, 6]]))


def test_hessians_of_experts_are_of_their_tokens_weighted_and_tempered(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("mixtral")))
    separate_experts(model)
    name, block = decoder_blocks(model)[0]
    experts = next(module for module in block.modules() if isinstance(module, RoutedExperts))
    linears = {key: module for key, module in block_linears(model).items() if key.startswith(f"{name}.")}
    seen: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    experts.get_submodule("2.w2").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    # Routing weights, one for each row above: the expert's tokens come in their order, and none chooses it twice.
    experts.register_forward_pre_hook(lambda _, args: weights.append(args[2].masked_fill(args[1] != 2, 0).sum(dim=1)))
    inputs = capture_inputs(in_memory_stream(model), _windows())
    seen.clear()  # of the pass that records how blocks are called
    weights.clear()
    hessian = block_hessians(block, inputs, 0, linears, Weighing(experts=expert_linears(model)))[
        f"{name}.mlp.experts.2.w2"
    ]
    rows, weight = torch.cat(seen), torch.cat(weights)
    weight = weight[weight > 0]
    assert weight.min() < weight.max()
    weighted = rows * weight[:, None]
    share, plain = trust(len(rows)), weighted.t() @ weighted / weight.square().sum()
    equal = torch.eye(len(plain)) * plain.diagonal().mean()
    torch.testing.assert_close(hessian, plain * share + equal * (1 - share), rtol=SUM_RTOL, atol=1e-6)


def test_an_expert_without_tokens_has_the_hessian_of_equal_channels(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("mixtral")))
    separate_experts(model)
    name, block = decoder_blocks(model)[0]
    block.mlp.gate.forward = lambda x: (None, torch.full((len(x), 2), 0.5), torch.tensor([[0, 1]]).expand(len(x), 2))
    linears = {key: module for key, module in block_linears(model).items() if key.startswith(f"{name}.")}
    inputs = capture_inputs(in_memory_stream(model), _windows())
    hessians = block_hessians(block, inputs, 0, linears, Weighing(experts=expert_linears(model)))
    assert torch.equal(hessians[f"{name}.mlp.experts.3.w1"], torch.eye(64))
    assert torch.equal(hessians[f"{name}.mlp.experts.3.w2"], torch.eye(96))
    with pytest.raises(ModelError, match="its block never calls it"):
        block_hessians(block, inputs, 0, linears)
