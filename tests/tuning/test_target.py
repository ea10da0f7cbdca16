"""What the original predicts, from states that are held or by reading the windows again."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from quantkit.models.families import block_linears, decoder_blocks
from quantkit.models.logits import log_probabilities
from quantkit.tuning.optimize import split_windows
from quantkit.tuning.target import Target
from quantkit.tuning.whole_model import held_tokens, tune_model
from tests.tiny import build_model
from tests.tuning.test_whole_model import LOSS_RTOL, SETTINGS, WINDOWS, models, text

PASS_RTOL = 1e-3  # rounding may move a code to the other side of a border


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bloom", "qwen3_moe", "lfm2", "gemma3"])
@torch.no_grad()
def test_target_repeats_the_originals_predictions_without_its_blocks(family: str) -> None:
    original, windows, numbers = build_model(family).eval(), text(), torch.tensor([7, 2, 11])
    wanted = log_probabilities(original, windows[numbers])
    target = Target(original, windows, at_once=5, held=True)
    for _, block in decoder_blocks(original):
        for parameter in block.parameters():
            parameter.zero_()
    torch.testing.assert_close(target.log_probabilities(numbers), wanted)
    assert not torch.allclose(log_probabilities(original, windows[numbers]), wanted)  # the blocks are whole again


def test_states_are_held_where_they_are_small_beside_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build_model("llama"), 1000
    states = 4 * tokens * model.config.hidden_size
    for total, held in ((4 * states, tokens), (3 * states, 0)):
        memory = SimpleNamespace(total=total, total_memory=total)
        monkeypatch.setattr("psutil.virtual_memory", lambda found=memory: found)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, found=memory: found)
        for device in (torch.device("cpu"), torch.device("cuda")):
            assert held_tokens(model, tokens, device) == held


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_moe"])
def test_windows_that_are_read_again_are_tuned_on_alike(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding: the same windows stand in other batches."""
    original, model = models(family)
    read: list[bool] = []
    windows, other = text(), copy.deepcopy(model)
    first = next(iter(block_linears(original).values()))
    first.register_forward_hook(lambda _block, _arguments, _output: read.append(True))
    held = tune_model(original, model, windows, SETTINGS, dtype=torch.float32)
    assert len(read) == 1
    monkeypatch.setattr("quantkit.tuning.whole_model.held_tokens", lambda _model, _tokens, _device: 0)
    again = tune_model(original, other, windows, SETTINGS, dtype=torch.float32)
    steps = SETTINGS.epochs * len(split_windows(WINDOWS, SETTINGS.held_out)[0].split(SETTINGS.batch))
    assert len(read) > steps  # at every one, and for the held-out loss
    assert again.before == pytest.approx(held.before, rel=LOSS_RTOL)
    assert again.after < again.before
    assert again.passes[0] == pytest.approx(held.passes[0], rel=PASS_RTOL)
