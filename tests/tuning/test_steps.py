"""Steps of tuning on a GPU: captured where they can be, and the same either way."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantkit.models.block_calls import BlockCall
from quantkit.tuning import steps
from quantkit.tuning.block import tune_block
from quantkit.tuning.optimize import TuneReport
from quantkit.tuning.whole_model import tune_model
from tests.tiny import VOCABULARY
from tests.tuning.test_block import INDEX, SETTINGS, setting_with_weights
from tests.tuning.test_whole_model import models

pytestmark = pytest.mark.cuda

# 12 windows, 10 of them tuned on: steps of three leave a step of one at the end of each pass.
CODES = replace(SETTINGS, blocks=3, batch=3, block_codes=True)
MODEL_PASSES = 3


def on_gpu(value: Any) -> Any:
    """The value with its tensors on the GPU."""
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, tuple | list):
        return type(value)(on_gpu(each) for each in value)
    return {key: on_gpu(each) for key, each in value.items()} if isinstance(value, dict) else value


def tuned(family: str, *, hidden_on_gpu: bool = True) -> tuple[nn.Module, TuneReport]:
    """A block of a tiny model, tuned on the GPU."""
    torch.manual_seed(3)
    block, inputs, targets, weights = setting_with_weights(family, bits=2)
    calls = tuple(BlockCall(on_gpu(call.arguments), on_gpu(call.keywords)) for call in inputs.calls)
    inputs = replace(inputs, calls=calls)
    if hidden_on_gpu:
        inputs, targets = inputs.with_hidden(inputs.hidden.cuda()), targets.cuda()
    report = tune_block(
        block.cuda(), INDEX, inputs, targets, CODES, dtype=torch.float32, original=lambda name: weights[name].cuda()
    )
    return block, report


def tuned_model(family: str, **changed: bool) -> tuple[TuneReport, dict[str, Tensor]]:
    """What passes of a whole tiny model on the GPU report, and the model's state."""
    torch.manual_seed(3)
    original, model = models(family)
    settings = replace(SETTINGS, blocks=0, epochs=MODEL_PASSES, batch=3, **changed)
    windows = torch.randint(0, VOCABULARY, (12, 16), generator=torch.Generator().manual_seed(5))
    report = tune_model(original.cuda(), model, windows, settings, dtype=torch.float32)
    return report, model.state_dict()


def count_replays(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry for every replay of a captured step."""
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(1)
        replay(graph)

    patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return replays


def take_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Nothing of a step is captured."""
    patch.setattr(steps, "_waits", lambda step: step() or True)
    patch.setattr(steps, "_Update", lambda step: step)


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_captured_steps_give_what_steps_one_by_one_give(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = count_replays(monkeypatch)
    block, report = tuned(family)
    full_batches = CODES.blocks * 3
    assert len(replays) == full_batches - 2
    assert report.after < report.before
    take_one_by_one(monkeypatch)
    other, plain = tuned(family)
    assert len(replays) == full_batches - 2
    assert report == plain
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_all_but_the_passes_of_steps_that_wait_is_captured_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = count_replays(monkeypatch)
    block, report = tuned("qwen3_moe")
    all_batches = CODES.blocks * 4
    assert len(replays) == all_batches - 2
    assert report.after < report.before
    assert torch.cuda.get_sync_debug_mode() == 0
    take_one_by_one(monkeypatch)
    other, plain = tuned("qwen3_moe")
    assert len(replays) == all_batches - 2
    assert report == plain
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_another_thread_that_waits_for_the_gpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = count_replays(monkeypatch)
    alone = tuned("llama")[1]
    captured, ended, failures = len(replays), threading.Event(), []

    def wait() -> None:
        try:
            while not ended.is_set():
                torch.ones(1, device="cuda").item()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        beside = tuned("llama")[1]
    finally:
        ended.set()
        thread.join()
    assert not failures
    assert beside == alone
    assert len(replays) == 2 * captured


def test_hidden_states_that_stay_in_memory_are_read_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = count_replays(monkeypatch)
    _, report = tuned("llama", hidden_on_gpu=False)
    assert not replays
    assert report.after < report.before


@pytest.mark.parametrize("changed", [{}, {"codes": True, "embeddings": True}], ids=["fixed", "all"])
def test_updates_of_a_whole_model_of_experts_are_captured_and_give_the_same(
    changed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = count_replays(monkeypatch)
    report, state = tuned_model("qwen3_moe", **changed)
    all_batches = MODEL_PASSES * 4
    assert len(replays) == all_batches - 2
    take_one_by_one(monkeypatch)
    plain, other = tuned_model("qwen3_moe", **changed)
    assert report == plain
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", ["llama", "bloom", "gpt2"])
@pytest.mark.parametrize("changed", [{}, {"codes": True}, {"embeddings": True}], ids=["fixed", "codes", "embeddings"])
def test_captured_steps_of_a_whole_model_give_what_steps_one_by_one_give(
    family: str, changed: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    replays = count_replays(monkeypatch)
    report, state = tuned_model(family, **changed)
    full_batches = MODEL_PASSES * 3
    assert len(replays) == full_batches - 2
    take_one_by_one(monkeypatch)
    plain, other = tuned_model(family, **changed)
    assert len(replays) == full_batches - 2
    assert report == plain
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name
