"""Generation: transformers' own tokens, one model or several at once, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, FalconConfig, MistralConfig

from quantkit.errors import GenerationError
from quantkit.models.loading import load_model
from quantkit.runtime.generation import Runner, captured_step, fused_runner, generate, next_logits, start, step
from tests.runtime.test_decoder_block import COVERED, model_of
from tests.runtime.test_merged_linears import packed

LOGITS_RTOL = 5e-3  # two fp16 blocks, rounded in other places


@pytest.mark.parametrize("runner", [Runner, fused_runner], ids=["own-code", "fused"])
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_greedy_tokens_equal_those_of_transformers(
    tiny_model: Callable[[str], Path], family: str, runner: Callable[[Any], Runner]
) -> None:
    model, _ = load_model(str(tiny_model(family)))
    ids = torch.randint(10, 300, (1, 7))
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, 9, runner=runner(model)), expected[0])


@pytest.mark.parametrize("alibi", [False, True], ids=["rotary", "alibi"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_falcon_generates_as_transformers_does(alibi: bool, attention: str) -> None:
    """Falcon's config says whether a model has ALiBi, which is made from a two-dimensional mask."""
    config = FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=320, alibi=alibi, bos_token_id=0
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    ids = torch.randint(10, 300, (1, 7))
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, 9), expected[0])


def test_generation_stops_at_the_end_token(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    ids = torch.randint(10, 300, (1, 5))
    tokens = generate(model, ids, 8)
    stop = int(tokens[7])
    first = tokens[5:].tolist().index(stop)
    assert generate(model, ids, 8, stop=stop).tolist() == tokens[: 5 + first + 1].tolist()


def generate_at_once(models: list[Any], prompts: list[Tensor], new_tokens: int) -> list[Tensor]:
    """Tokens of each model, a thread each, which go on only when all have made the same number of tokens."""
    together = Barrier(len(models))

    def run(model: Any, ids: Tensor) -> Tensor:
        together.wait()
        session = start(model, ids, ids.shape[1] + new_tokens, runner=fused_runner(model))
        advance = captured_step(session)
        for _ in range(new_tokens - 1):
            together.wait()
            advance()
        return session.tokens[0, : int(session.position) + 1]

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(run, models, prompts))


@pytest.mark.parametrize("method", [None, "bcq-w3-g32"], ids=["float", "bcq"])
@pytest.mark.parametrize(
    "families",
    [("llama", "opt"), ("llama", "llama"), ("opt", "opt"), ("qwen3", "qwen3", "llama", "opt")],
    ids="+".join,
)
def test_models_in_several_threads_give_the_tokens_that_each_gives_alone(
    families: tuple[str, ...], method: str | None
) -> None:
    models = [model_of(COVERED[family]) for family in families]
    if method is not None:
        for model in models:
            packed(model, method)
    prompts = [torch.randint(5, 50, (1, 6 + index)) for index in range(len(models))]
    alone = [generate(model, ids, 20, runner=fused_runner(model)) for model, ids in zip(models, prompts, strict=True)]
    assert len({tuple(tokens[-20:].tolist()) for tokens in alone}) == len(models)
    for _ in range(3):
        assert all(map(torch.equal, generate_at_once(models, prompts, 20), alone))


def test_one_model_continues_two_prompts_in_two_threads() -> None:
    model, prompts = model_of(COVERED["llama"]), [torch.randint(5, 50, (1, 6)) for _ in range(2)]
    alone = [generate(model, ids, 20, runner=fused_runner(model)) for ids in prompts]
    assert all(map(torch.equal, generate_at_once([model, model], prompts, 20), alone))


def test_a_session_goes_on_beside_a_later_one_of_the_same_model() -> None:
    model, prompts = model_of(COVERED["opt"]), [torch.randint(5, 50, (1, 6)) for _ in range(2)]
    alone = [generate(model, ids, 8, runner=fused_runner(model)) for ids in prompts]
    sessions = []
    for ids in prompts:
        sessions.append(start(model, ids, 14, runner=fused_runner(model)))
        step(sessions[0])
    for _ in range(5):
        step(sessions[0])
        step(sessions[1])
    step(sessions[1])
    step(sessions[1])
    for session, expected in zip(sessions, alone, strict=True):
        assert torch.equal(session.tokens[0, :14], expected)


def test_the_cpu_runs_the_models_own_code(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    session = start(model, torch.tensor([[1, 2, 3]]), 8)
    assert session.runner.model is model


def test_a_prompt_of_no_tokens_is_refused(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    with pytest.raises(GenerationError, match="the prompt has no tokens"):
        generate(model, torch.ones(1, 0, dtype=torch.long), 4)


def test_prompt_beyond_the_positions_is_refused(tiny_model: Callable[[str], Path]) -> None:
    model, _ = load_model(str(tiny_model("llama")))
    with pytest.raises(GenerationError, match="exceed the model's 256 positions"):
        generate(model, torch.ones(1, 250, dtype=torch.long), 20)


def windowed_model() -> Any:
    config = MistralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=300, sliding_window=20,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("runner", [Runner, fused_runner], ids=["own-code", "fused"])
def test_tokens_within_a_sliding_window_equal_those_of_transformers(runner: Callable[[Any], Runner]) -> None:
    model, ids = windowed_model(), torch.randint(10, 300, (1, 9))
    expected = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(model, ids, 10, runner=runner(model)), expected[0])


def test_a_text_beyond_the_sliding_window_is_refused() -> None:
    message = "21 tokens of prompt and answer exceed the model's sliding window of 20"
    with pytest.raises(GenerationError, match=message):
        generate(windowed_model(), torch.ones(1, 9, dtype=torch.long), 12)


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_logits_agree_with_the_models_own_code(family: str, tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).half().cuda().eval()
    ids = torch.randint(5, 50, (1, 9), device="cuda")
    fast, plain = (start(model, ids, 32, runner=runner) for runner in (None, Runner(model)))
    for _ in range(3):
        expected = next_logits(plain)
        assert (next_logits(fast) - expected).norm() < LOGITS_RTOL * expected.norm()
        for session in (fast, plain):
            session.token.copy_(expected.argmax(-1, keepdim=True))
            session.position.add_(1)
    for used, untouched in zip(fast.cache.layers, plain.cache.layers, strict=True):
        assert used.cumulative_length == untouched.cumulative_length == 12


@pytest.mark.cuda
def test_graphs_captured_in_two_threads_give_the_tokens_of_each_alone() -> None:
    models = [model_of(COVERED[family]).half().cuda() for family in ("llama", "opt")]
    prompts = [torch.randint(5, 50, (1, 6), device="cuda") for _ in models]
    alone = [generate(model, ids, 20) for model, ids in zip(models, prompts, strict=True)]
    assert all(map(torch.equal, generate_at_once(models, prompts, 20), alone))
