"""Experts of a block at once: the same results, one copy of the tensors, and who runs one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantkit import load
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.experts import RoutedExperts
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.recipe import load_recipe
from quantkit.runtime import grouped_experts
from quantkit.runtime.decoder_block import fused_blocks
from quantkit.runtime.generation import captured_step, start, step
from quantkit.runtime.grouped_experts import ExpertsWeight, GroupedExperts, group_experts, run_by_host
from tests.tiny import VOCABULARY

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")  # hub names of each kind; biases and rows that alternate
ATOL = 1e-5  # fp32 sums in another order
FP16_LOGIT_ATOL = 2e-2  # two blocks of fp16 products, codes of x against x itself
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def quantized(tiny_model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """family -> its checkpoint."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("grouped") / family
            recipe = load_recipe("bcq-w3-g128", ["group_size=32"])
            quantize_model(str(tiny_model(family)), recipe, made[family], calibration=None, options=QuantizeOptions())
        return made[family]

    return folder


def _first(folder: Path) -> RoutedExperts:
    """The first block's experts, in the kernels' order as on a GPU."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    for module in experts.modules():
        if isinstance(module, QuantizedLinear):
            module.prepare()
    return experts


def _joined(experts: RoutedExperts) -> GroupedExperts:
    children = [experts.get_submodule(str(index)) for index in range(experts.num_experts)]
    first = [[child.get_submodule(name) for name in experts.names.first] for child in children]
    last = [[child.get_submodule(experts.names.last)] for child in children]
    return GroupedExperts(ExpertsWeight.of(first), ExpertsWeight.of(last), experts.between, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_all_at_once_give_what_each_gives(family: str, quantized: Tiny) -> None:
    experts = _first(quantized(family))
    together, x = _joined(experts), torch.randn(7, 64)
    chosen = torch.randint(0, experts.num_experts + 1, (14,))  # the last is no expert
    with torch.no_grad():
        torch.testing.assert_close(together(x, chosen), experts._one_by_one(x, chosen), atol=ATOL, rtol=0)


def test_experts_share_the_joined_tensors(quantized: Tiny) -> None:
    experts = _first(quantized("mixtral"))
    together = _joined(experts)
    whole = together.first.tensors["tiles"]
    for index in range(experts.num_experts):
        for name in experts.names.first:
            tiles = experts.get_submodule(f"{index}.{name}").get_parameter("tiles")
            assert tiles.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    again = _joined(experts)
    assert again.first.tensors["tiles"].data_ptr() == whole.data_ptr()


def test_16_bit_activations_run_together_and_fp32_ones_do_not() -> None:
    from tests.models.test_experts import _first as fused

    experts, calls = fused("mixtral").half(), []

    def together(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        return x.new_zeros(len(chosen), x.shape[-1])

    experts.together = together
    chosen, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    experts(torch.randn(1, 64).half(), chosen, weights.half())
    experts.together = together
    with torch.no_grad():
        experts.float()
        assert experts.together is None  # its tensors are not those of the experts any more
        experts.together = together
        experts(torch.randn(1, 64), chosen, weights)
    assert calls == [torch.float16]


def test_moved_and_loaded_experts_are_joined_anew(quantized: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_experts, "grouped", _joined)
    experts = _first(quantized("mixtral"))
    experts.group = None
    group_experts(experts)
    first = experts.together
    assert first is not None
    experts.load_state_dict(experts.state_dict())
    second = experts.together
    assert second is not first
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    state["0.w1.signs"].bitwise_not_()
    experts.load_state_dict(state)
    x, chosen = torch.randn(1, 64), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        assert experts.together is not None
        torch.testing.assert_close(experts.together(x, chosen), experts._one_by_one(x, chosen), atol=ATOL, rtol=0)


def test_experts_keep_the_order_that_their_common_product_reads(quantized: Tiny) -> None:
    model = load(str(quantized("mixtral")), device="cpu", layout="batch")
    layouts = {name: module.layout for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert {layout for name, layout in layouts.items() if ".experts." in name} == {"latency"}
    assert {layout for name, layout in layouts.items() if ".experts." not in name} == {"batch"}


def test_experts_on_a_cpu_are_run_by_the_host(quantized: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized("mixtral"))
    experts = next(module for module in model.modules() if isinstance(module, RoutedExperts))
    assert experts.group is not None
    assert experts.together is None
    assert run_by_host(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_single_tokens_take_the_models_own_blocks(family: str, quantized: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized(family))
    assert fused_blocks(model) == []  # its blocks hold no Linear in floating point, by which others are found


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_model_runs_its_experts_together(family: str, dtype: torch.dtype, quantized: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized(family), dtype=dtype).cuda()
    assert not run_by_host(model)
    ids = torch.randint(0, VOCABULARY, (2, 24), device="cuda")
    with torch.no_grad():
        at_once = model(ids).logits
        assert torch.equal(model(ids).logits, at_once)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.together = None
        expected = model(ids).logits
    slack = FP16_LOGIT_ATOL * (8 if dtype == torch.bfloat16 else 1)
    assert (at_once - expected).abs().max() < slack * max(1.0, float(expected.abs().max()))


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_holds_a_decoding_step(family: str, quantized: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized(family), dtype=torch.float16).cuda()
    ids = torch.randint(0, VOCABULARY, (1, 8), device="cuda")
    captured, plain = start(model, ids, 32), start(model, ids, 32)
    replay = captured_step(captured)
    assert getattr(replay, "__name__", "") == "replay"  # of the graph
    for _ in range(12):
        replay()
        step(plain)
    assert torch.equal(captured.tokens, plain.tokens)
    assert torch.equal(captured.position, plain.position)


@pytest.mark.cuda
def test_fp32_models_run_their_experts_by_the_host(quantized: Tiny) -> None:
    model = AutoModelForCausalLM.from_pretrained(quantized("mixtral"), dtype=torch.float32).cuda()
    assert run_by_host(model)
    session = start(model, torch.randint(0, VOCABULARY, (1, 8), device="cuda"), 32)
    captured_step(session)()
    assert session.position.item() == 9
