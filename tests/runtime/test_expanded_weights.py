from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from quantkit.formats.bipolar import BipolarSpec
from quantkit.models.loading import load_model
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.runtime.expanded_weights import expand_weights, expanded, expanded_on_cpu
from tests.pipeline import quantize_tiny

IDS = torch.tensor([[5, 40, 100, 7, 22]])


@pytest.fixture(params=[False, True], ids=["plain", "rotated"])
def checkpoint(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    rotated = ("rotate_inputs=true",) if request.param else ()
    quantize_tiny(tiny_model("opt"), tmp_path / "q", "bcq-w4-g128", *rotated)
    return tmp_path / "q"


def test_expanded_weights_give_the_same_bits(checkpoint: Path) -> None:
    model, _ = load_model(str(checkpoint))
    with torch.no_grad():
        before = model(IDS).logits
        expansion = expand_weights(model)
        assert torch.equal(model(IDS).logits, before)
    assert expansion.done
    assert expansion.linears == sum(isinstance(m, nn.Linear) for m in model.modules()) - 1  # lm_head was one before
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_a_module_is_expanded_while_entered(checkpoint: Path) -> None:
    model, _ = load_model(str(checkpoint))
    held = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    with torch.no_grad():
        before = model(IDS).logits
        with expanded(model):
            assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
            assert torch.equal(model(IDS).logits, before)
    assert [module for module in model.modules() if isinstance(module, QuantizedLinear)] == held


def test_without_memory_the_weights_stay(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load_model(str(checkpoint))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    expansion = expand_weights(model)
    assert not expansion.done
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == expansion.linears


def test_requests_find_weights_expanded_or_are_told_that_they_are_not(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = load_model(str(checkpoint))
    held = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    with expanded_on_cpu(model):
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert [module for module in model.modules() if isinstance(module, QuantizedLinear)] == held
    assert not capsys.readouterr().err
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    with expanded_on_cpu(model):
        assert [module for module in model.modules() if isinstance(module, QuantizedLinear)] == held
    assert "too little memory" in capsys.readouterr().err


def test_quantized_activations_stay_integers() -> None:
    linear = QuantizedLinear(BipolarSpec(4, 8), 16, 8, bias=False, dtype=torch.float32, device="cpu")
    model = nn.Sequential(linear)
    assert expand_weights(model).linears == 0
    assert model[0] is linear
