"""A block's experts in the vLLM plugin, without vLLM: what a rank keeps, computes and refuses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from quantkit.errors import CheckpointError
from quantkit.formats.bcq import BcqSpec
from quantkit.formats.bipolar import BipolarSpec
from quantkit.formats.trellis import TrellisSpec
from tests.integrations import vllm_stub
from tests.integrations.vllm_layers import (
    BCQ,
    BCQ3,
    FP32_ATOL,
    FP32_RTOL,
    ROTATED,
    Stored,
    config_of,
    stored,
    weight_of,
)

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 128, 128, 7
PREFIX = "model.layers.0.mlp.experts"
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
SHARDS = ("w1", "w3", "w2")
GPU_CHECKS = "quantkit.integrations.vllm.experts"


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vllm_stub.install(monkeypatch)


def experts(first: Any = BCQ, last: Any = BCQ, names: tuple[str, ...] = QWEN) -> Stored:
    linears: Stored = {}
    for index in range(EXPERTS):
        for name, spec in zip(names, (first, first, last), strict=True):
            shape = (HIDDEN, INTERMEDIATE) if name == names[2] else (INTERMEDIATE, HIDDEN)
            linears |= stored(f"{PREFIX}.{index}.{name}", spec, shape)
    return linears


def built(linears: Stored, **place: Any) -> tuple[Any, Any]:
    layer = vllm_stub.RoutedExperts(EXPERTS, **place)
    method = config_of(linears).get_quant_method(layer, PREFIX)
    own = INTERMEDIATE // layer.moe_config.tp_size
    method.create_weights(layer, layer.local_num_experts, HIDDEN, own, torch.float32, global_num_experts=EXPERTS)
    return layer, method


def fed(layer: Any, linears: Stored) -> list[bool]:
    """Hand the layer all stored tensors, as vLLM's loaders do; what its loader answered."""
    answers = []
    for number, (_, tensors) in enumerate(linears.values()):
        expert, shard_id = number // len(SHARDS), SHARDS[number % len(SHARDS)]
        for name, tensor in tensors.items():
            own = f"{'w2' if shard_id == 'w2' else 'w13'}_{name}"
            parameter: Any = dict(layer.named_parameters())[own]
            given = {"shard_id": shard_id, "expert_id": expert, "return_success": True}
            answers.append(parameter.weight_loader(parameter, tensor, f"{PREFIX}.routed_experts.{own}", **given))
    return answers


def loaded(linears: Stored, **place: Any) -> tuple[Any, Any]:
    layer, method = built(linears, **place)
    fed(layer, linears)
    method.process_weights_after_loading(layer)
    return layer, method


def routed() -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and experts of every choice; the last token's choices are the same as the first's."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    chosen[-1] = chosen[0]
    return torch.randn(TOKENS, HIDDEN), torch.rand(TOKENS, TOP_K), chosen


def expected(linears: Stored, x: Tensor, weights: Tensor, chosen: Tensor, only: range = range(EXPERTS)) -> Tensor:
    """Expert after expert from the stored weights."""
    y = torch.zeros_like(x)
    own = [weight_of(*linear) for linear in linears.values()]
    for token in range(len(x)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            if expert in only:
                gate, up, down = own[expert * 3 : expert * 3 + 3]
                y[token] += weight * (down @ (silu(gate @ x[token]) * (up @ x[token])))
    return y


@pytest.mark.parametrize("names", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
@pytest.mark.parametrize(
    ("first", "last"),
    [(BCQ, BCQ), (BCQ3, BcqSpec(2, -1, False)), (BcqSpec(4, 64, True, scale_bits=8), BCQ)],
    ids=["equal", "other-down", "scales8"],
)
def test_experts_compute_what_their_linears_do(first: Any, last: Any, names: tuple[str, ...]) -> None:
    linears, (x, weights, chosen) = experts(first, last, names), routed()
    layer, method = loaded(linears)
    y = method.apply(layer, x, weights, chosen)
    torch.testing.assert_close(y, expected(linears, x, weights, chosen), rtol=FP32_RTOL, atol=_atol(y))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_tensor_parallelism_add_up(ranks: int) -> None:
    linears, (x, weights, chosen) = experts(), routed()
    parts = [loaded(linears, rank=rank, ranks=ranks) for rank in range(ranks)]
    y = sum(method.apply(layer, x, weights, chosen) for layer, method in parts)
    torch.testing.assert_close(y, expected(linears, x, weights, chosen), rtol=FP32_RTOL, atol=_atol(y))


@pytest.mark.parametrize("own", [[0, 1], [1, 3]], ids=["linear", "round-robin"])
def test_ranks_of_expert_parallelism_run_their_own(own: list[int]) -> None:
    linears, (x, weights, chosen) = experts(), routed()
    layer, method = built(linears, own=own)
    taken = fed(layer, linears)
    assert sum(taken) * EXPERTS == len(taken) * len(own)
    method.process_weights_after_loading(layer)
    y = method.apply(layer, x, weights, chosen)
    whole = sum(expected(linears, x, weights, chosen, range(expert, expert + 1)) for expert in own)
    torch.testing.assert_close(y, whole, rtol=FP32_RTOL, atol=_atol(y))


def test_only_the_kernels_tensors_stay() -> None:
    layer, _ = loaded(experts())
    assert set(dict(layer.named_parameters())) == {"w13_tiles", "w13_scale_tiles", "w2_tiles", "w2_scale_tiles"}


def test_dummy_weights_of_experts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stub.SETTINGS.load_config, "load_format", "dummy")
    layer, method = built(experts())
    vllm_stub.fill_as_dummy(layer)
    method.process_weights_after_loading(layer)
    assert bool(method.apply(layer, *routed()).isfinite().all())


def test_experts_in_floating_point_are_vllms_own() -> None:
    config = config_of(stored("model.layers.0.self_attn.o_proj", BCQ, (HIDDEN, HIDDEN)))
    assert config.get_quant_method(vllm_stub.RoutedExperts(EXPERTS), PREFIX) is None


def test_a_missing_tensor_of_an_expert_is_refused_by_name() -> None:
    linears = experts()
    layer, method = built(linears)
    name = f"{PREFIX}.2.up_proj"
    spec, tensors = linears[name]
    fed(layer, {**linears, name: (spec, {own: tensor for own, tensor in tensors.items() if own != "scales"})})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj\.scales: missing"):
        method.process_weights_after_loading(layer)


def _without(linears: Stored) -> Stored:
    return {name: linear for name, linear in linears.items() if name != f"{PREFIX}.1.gate_proj"}


def _mixed(linears: Stored) -> Stored:
    return {**linears, **stored(f"{PREFIX}.3.up_proj", BCQ3, (INTERMEDIATE, HIDDEN))}


@pytest.mark.parametrize(
    ("linears", "says"),
    [
        (lambda: experts(BipolarSpec(4, 16, 64)), r"experts\.0\.gate_proj: an expert in the format bipolar"),
        (lambda: experts(TrellisSpec(2, 4)), r"experts\.0\.gate_proj: an expert in the format trellis"),
        (lambda: _without(experts()), r"experts\.1\.gate_proj: is in floating point beside quantized experts"),
        (lambda: experts(ROTATED["bcq-rotated"]), r"experts\.0\.gate_proj: an expert whose inputs are rotated"),
        (lambda: _mixed(experts()), r"experts\.3\.up_proj: .*need one setting"),
        (lambda: experts(names=("gate_up", "x", "down")), "experts are not served, use transformers"),
    ],
    ids=["bipolar", "trellis", "floating-point", "rotated", "mixed", "names"],
)
def test_experts_that_cannot_run_at_once_are_refused(linears: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        config_of(linears()).get_quant_method(vllm_stub.RoutedExperts(EXPERTS), PREFIX)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"has_bias": True}, "experts with a bias"),
        ({"activation": SimpleNamespace(value="swigluoai")}, "activation swigluoai"),
        ({"is_lora_enabled": True}, "LoRA adapters beside quantized experts"),
    ],
    ids=["bias", "activation", "lora"],
)
def test_layers_that_the_product_does_not_compute_are_refused(change: dict[str, Any], says: str) -> None:
    layer = vllm_stub.RoutedExperts(EXPERTS)
    vars(layer.moe_config).update(change)
    with pytest.raises(CheckpointError, match=says):
        config_of(experts()).get_quant_method(layer, PREFIX)


@pytest.mark.parametrize("fact", [{"apply_router_weight_on_input": True}, {"swiglu_limit": 7.0}], ids=lambda f: min(f))
def test_experts_with_more_between_their_products_are_refused(fact: dict[str, Any]) -> None:
    layer = vllm_stub.RoutedExperts(EXPERTS)
    vars(layer).update(fact)
    method = config_of(experts()).get_quant_method(layer, PREFIX)
    with pytest.raises(CheckpointError, match="are not served"):
        method.create_weights(layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.float32)


def test_a_gpu_without_a_kernel_for_the_experts_refuses_them_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = vllm_stub.RoutedExperts(EXPERTS)
    method = config_of(experts()).get_quant_method(layer, PREFIX)
    part = SimpleNamespace(device=torch.device("cuda"), kept_spec=BCQ, kept_shape=(INTERMEDIATE, HIDDEN), name=PREFIX)
    from quantkit.cuda.architectures import architecture

    monkeypatch.setattr(f"{GPU_CHECKS}.gpu_of", lambda device: SimpleNamespace(architecture=architecture(9, 0)))
    method._check_kernels(part, torch.float16)
    with pytest.raises(CheckpointError, match="float32 has no kernel that runs all experts at once"):
        method._check_kernels(part, torch.float32)
    part.kept_spec = replace(BCQ, group_size=40)
    with pytest.raises(CheckpointError, match="groups of a multiple of 32"):
        method._check_kernels(part, torch.float16)


def _atol(y: Any) -> float:
    """Two products in a row: the rounding of the first counts by the size of the second's outputs."""
    return FP32_ATOL * max(1.0, float(y.abs().max()))
