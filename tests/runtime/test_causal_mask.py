"""Masks of context passes where transformers may not look at them, as while a CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from quantkit.runtime.causal_mask import plain_causal

IDS = torch.arange(10, 26)[None]


def _masks(monkeypatch: pytest.MonkeyPatch, model: Any, plain: bool) -> tuple[Tensor, list[bool]]:
    """Logits, and per attention whether it had a mask; transformers thinks that it is being traced."""
    seen: list[bool] = []
    attend = functional.scaled_dot_product_attention

    def spy(*operands: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        seen.append(attn_mask is not None)
        return attend(*operands, attn_mask=attn_mask, **options)

    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False}
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(functional, "scaled_dot_product_attention", spy)
        patch.setattr(masking_utils, "is_tracing", lambda *_: True)
        if not plain:
            return model(**given).logits, seen
        with plain_causal(model):
            return model(**given).logits, seen


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_plain_causal_pass_has_no_mask(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path], family: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family)).eval()
    before, own = dict(ALL_MASK_ATTENTION_FUNCTIONS), model.config._attn_implementation
    with_mask, masked = _masks(monkeypatch, model, plain=False)
    without, plain = _masks(monkeypatch, model, plain=True)
    assert all(masked)
    assert len(plain) == len(masked)
    assert not any(plain)
    torch.testing.assert_close(without, with_mask)
    assert {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in before} == before
    assert model.config._attn_implementation == own


def test_another_model_keeps_its_masks_meanwhile(tiny_model: Callable[[str], Path]) -> None:
    model, other = (AutoModelForCausalLM.from_pretrained(tiny_model("llama")).eval() for _ in range(2))
    padding = torch.ones_like(IDS)
    padding[:, :4] = 0
    with torch.no_grad():
        expected = other(IDS, attention_mask=padding).logits
        with plain_causal(model):
            assert torch.equal(other(IDS, attention_mask=padding).logits, expected)


def test_a_sliding_window_keeps_its_mask(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]) -> None:
    llama = AutoConfig.from_pretrained(tiny_model("llama")).to_dict()
    shape = {name: value for name, value in llama.items() if name not in ("model_type", "architectures")}
    windowed = MistralForCausalLM(MistralConfig(**shape | {"sliding_window": 4})).eval()
    assert all(_masks(monkeypatch, windowed, plain=True)[1])


def test_models_with_attention_of_their_own_are_left_alone(tiny_model: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model("bloom")).eval()
    with torch.no_grad():
        expected = model(IDS).logits
        with plain_causal(model):
            assert torch.equal(model(IDS).logits, expected)
