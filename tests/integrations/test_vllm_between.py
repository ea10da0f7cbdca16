"""Norms, gated activations and rotary embeddings that vLLM builds in place of its own."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations import vllm_stub

K, TOKENS = 1024, 3
HEAD, POSITIONS = 64, 50
OURS = SimpleNamespace(get_name=lambda: "quantkit")
ANOTHERS = SimpleNamespace(get_name=lambda: "fp8")
FP16_RTOL, FP16_ATOL = 2e-3, 2e-3  # a result is rounded twice, torch rounds it once
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_stub.install(monkeypatch)


def built(monkeypatch: pytest.MonkeyPatch, quantization: Any, device: str) -> tuple[Any, Any]:
    """A norm and an activation as vLLM builds them in a model."""
    import_module("quantkit.integrations.vllm.between")
    monkeypatch.setattr(vllm_stub.SETTINGS, "quant_config", quantization)
    with torch.device(device):
        return vllm_stub.PUT_IN["RMSNorm"](K, eps=1e-5).half(), vllm_stub.PUT_IN["SiluAndMul"]()  # type: ignore[call-arg]


def results(norm: Any, activation: Any, x: Tensor, residual: Tensor) -> list[Tensor]:
    found = [norm.forward_cuda(x), *norm.forward_cuda(x, residual), activation.forward_cuda(x)]
    natively = [norm.forward_native(x), *norm.forward_native(x, residual), activation.forward_native(x)]
    assert all(torch.equal(one, other) for one, other in zip(found, natively, strict=True))
    return found


@pytest.mark.parametrize("quantization", [None, ANOTHERS, OURS], ids=["none", "another", "ours"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_they_compute_what_those_of_vllm_do(quantization: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, activation = built(monkeypatch, quantization, device)
    x, residual = torch.randn(2, TOKENS, K, device=device).half().unbind()
    norm.weight.data.uniform_(0.5, 1.5)
    with torch.device(device):
        plain_norm, plain_activation = vllm_stub.RMSNorm(K, eps=1e-5).half(), vllm_stub.SiluAndMul()
    plain_norm.weight.data.copy_(norm.weight.data)
    expected = results(plain_norm, plain_activation, x, residual)
    for one, other in zip(results(norm, activation, x, residual), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=FP16_RTOL, atol=FP16_ATOL)


def rotation(cls: type, quantization: Any, device: str, monkeypatch: pytest.MonkeyPatch, *, neox: bool) -> Any:
    """A rotary embedding as vLLM builds it in a model."""
    import_module("quantkit.integrations.vllm.between")
    monkeypatch.setattr(vllm_stub.SETTINGS, "quant_config", quantization)
    with torch.device(device):
        return vllm_stub.PUT_IN[cls.__name__](HEAD, HEAD // 2, POSITIONS, neox, torch.float16)  # type: ignore[call-arg]


@pytest.mark.parametrize("cls", vllm_stub.ROTATIONS)
@pytest.mark.parametrize("quantization", [None, OURS], ids=["none", "ours"])
@pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_queries_and_keys_turn_as_vllm_turns_them(
    cls: type, quantization: Any, neox: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rotation(cls, quantization, device, monkeypatch, neox=neox)
    assert isinstance(own, cls)
    query, key, _ = torch.randn(TOKENS, 8 * HEAD, device=device).half().split((4 * HEAD, 2 * HEAD, 2 * HEAD), -1)
    positions = torch.tensor([3, 0, POSITIONS - 1], device=device)
    for method in ("forward_native", "forward_cuda"):
        for keys in (key, None):
            found = getattr(own, method)(positions, query, keys)
            expected = vllm_stub.RotaryEmbedding.forward_native(own, positions, query, keys)
            assert (found[1] is None) == (keys is None)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=FP16_RTOL, atol=FP16_ATOL)


@pytest.mark.cuda
def test_only_a_rotation_of_halves_in_a_model_of_quantkit_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    overlaps = torch.cuda.get_device_capability()[0] >= 9
    for quantization, neox in ((ANOTHERS, True), (OURS, False), (OURS, True)):
        own = rotation(vllm_stub.RotaryEmbedding, quantization, "cuda", monkeypatch, neox=neox)
        assert own.ours == (overlaps and neox and quantization is OURS)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_only_a_model_of_quantkit_gets_its_kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for quantization in (None, ANOTHERS):
        assert not any(module.ours for module in built(monkeypatch, quantization, device))
    overlaps = device == "cuda" and torch.cuda.get_device_capability()[0] >= 9
    assert all(module.ours == overlaps for module in built(monkeypatch, OURS, device))


def test_those_of_another_plugin_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(vllm_stub.RMSNorm):
        """What another plugin has put in."""

    vllm_stub.PUT_IN["RMSNorm"] = Others
    import_module("quantkit.integrations.vllm.between")
    assert vllm_stub.PUT_IN["RMSNorm"] is Others
    assert vllm_stub.PUT_IN["SiluAndMul"].__name__ == "EarlySiluAndMul"
