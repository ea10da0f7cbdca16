"""Fused pairs inside whole models: the models' own code runs, and nothing but the memory of y is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PhiConfig

import quantkit
from quantkit.bench.flatten_layers import random_flatten_linear
from quantkit.bench.prefill import check_pairs
from quantkit.cuda.graph import FilledScalars
from quantkit.errors import BenchError
from quantkit.formats.flatten import FlattenSpec
from quantkit.jobs.quantize import QuantizeOptions, quantize_model
from quantkit.models.families import block_linears, linear_shape
from quantkit.nn.clipping import count_clipping
from quantkit.nn.flatten_linear import ActCodes
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.ops.activations import ACTIVATIONS
from quantkit.recipe import load_recipe
from quantkit.runtime import fused_ffn
from quantkit.runtime.fused_ffn import FusedPair, PassingActivation, fuse_chains, fused_pairs
from tests.tiny import CONFIGS

_WIDE = {"hidden_size": 64, "intermediate_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4}
_FEW = {"vocab_size": 320, "max_position_embeddings": 64}
MODELS = {
    "opt": CONFIGS["opt"],
    "bloom": CONFIGS["bloom"],
    "gpt2": CONFIGS["gpt2"],
    "gpt-neox": GPTNeoXConfig(**_WIDE, **_FEW),
    "phi": PhiConfig(**_WIDE, **_FEW, hidden_act="silu"),
}
NAMES = {"opt": "relu", "bloom": "gelu_fast", "gpt2": "gelu_new", "gpt-neox": "gelu", "phi": "silu"}
LOGIT_RTOL = 1e-2  # of the norm: a code in ten thousand may be off by one behind tanh, erf and exp on a GPU


def _model(name: str, device: torch.device, bits: int = 8, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A tiny model whose block Linears are prepared flatten layers of random codes, with a fused pair per block."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name]), dtype=dtype).eval().to(device)
    for path, linear in block_linears(model).items():
        rows, columns = linear_shape(linear)
        spec = FlattenSpec(bits, bits, (columns + columns // 4) // 32 * 32 + 32, smooth=path.endswith("2"))
        packed = random_flatten_linear(spec, (rows, columns), torch.empty(0, dtype=dtype, device=device))
        packed.bias = nn.Parameter(torch.randn(rows, dtype=dtype, device=device), requires_grad=False)
        packed.prepare()
        model.set_submodule(path, packed)
    fuse_chains(model)
    return model


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activation of every fused product from here on."""
    made, real = [], fused_ffn.requantized_forward

    def counted(source: Any, x: Any, activation: str, target: Any) -> ActCodes:
        made.append(activation)
        return real(source, x, activation, target)

    monkeypatch.setattr(fused_ffn, "requantized_forward", counted)
    return made


def _apart(model: nn.Module) -> None:
    """Let the pairs of a model compute one by one: a hook expects a tensor."""
    for pair in fused_pairs(model).values():
        pair.target.register_forward_pre_hook(lambda module, arguments: None)


def _ids(device: torch.device, rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(10, 300, (rows, length), device=device)


@pytest.mark.parametrize("bits", [4, 8], ids=["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_whole_model_gives_the_logits_of_its_layers_one_by_one(
    device: torch.device, name: str, dtype: torch.dtype, bits: int, calls: list[str]
) -> None:
    model = _model(name, device, bits, dtype)
    for rows, length in ((1, 1), (1, 7), (5, 13), (2, 33)):
        ids, before = _ids(device, rows, length), len(calls)
        fused = model(ids).logits
        assert calls[before:] == [NAMES[name]] * 2
        plain = copy.deepcopy(model)
        _apart(plain)
        expected = plain(ids).logits
        assert len(calls) == before + 2
        if ACTIVATIONS[NAMES[name]].exact or device.type == "cpu":
            assert torch.equal(fused, expected)
        else:
            assert (fused - expected).float().norm() <= LOGIT_RTOL * expected.float().norm()


@torch.no_grad()
def test_generation_is_the_same(device: torch.device, calls: list[str]) -> None:
    model = _model("opt", device)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    ids = _ids(device)
    fused = model.generate(ids, **options)
    assert len(calls) == 2 * 5
    _apart(model)
    assert torch.equal(model.generate(ids, **options), fused)


def test_layers_called_on_their_own_give_tensors() -> None:
    model = _model("opt", torch.device("cpu"))
    model(_ids(torch.device("cpu")))
    (pair, _) = fused_pairs(model).values()
    x = torch.randn(3, 64).bfloat16()
    y = pair.source(x)
    assert y.shape == (3, 128)
    assert torch.equal(pair.between(y), y.relu())


@pytest.mark.parametrize("which", ["source", "between", "target"])
def test_who_watches_a_layer_sees_tensors(which: str, calls: list[str]) -> None:
    model = _model("opt", torch.device("cpu"))
    seen: list[Any] = []
    for pair in fused_pairs(model).values():
        getattr(pair, which).register_forward_hook(lambda module, arguments, result: seen.extend((*arguments, result)))
    model(_ids(torch.device("cpu")))
    assert len(seen) == 4
    assert all(isinstance(value, torch.Tensor) for value in seen)
    assert calls == []
    with count_clipping(model) as counts:
        model(_ids(torch.device("cpu")))
    assert all(count.seen for count in counts.values())


def test_replaced_and_unprepared_layers_are_left_alone(calls: list[str]) -> None:
    model, ids = _model("opt", torch.device("cpu")), _ids(torch.device("cpu"))
    expected = model(ids).logits
    first, second = fused_pairs(model).values()
    assert (len(calls), first.activation) == (2, "relu")
    first.target.restore()
    model.set_submodule("model.decoder.layers.1.fc1", nn.Sequential(second.source))  # as adapters do
    assert torch.equal(model(ids).logits, expected)
    assert len(calls) == 2


def test_an_error_in_the_block_disarms_the_pair() -> None:
    model = _model("opt", torch.device("cpu"))
    (pair, _) = fused_pairs(model).values()
    with pytest.raises(TypeError):
        model.model.decoder.layers[0]("no tensor")
    assert pair.source.follower is None


def test_fp32_models_compute_one_by_one(calls: list[str]) -> None:
    model = _model("opt", torch.device("cpu"), dtype=torch.float32)
    assert model(_ids(torch.device("cpu"))).logits.dtype == torch.float32
    assert calls == []


def test_fusing_again_or_an_unknown_function_changes_nothing() -> None:
    model = _model("opt", torch.device("cpu"))
    pairs = fused_pairs(model)
    fuse_chains(model)
    assert fused_pairs(model) == pairs
    config = copy.deepcopy(CONFIGS["opt"])
    config.activation_function = "quick_gelu"
    other = AutoModelForCausalLM.from_config(config)
    fuse_chains(other)
    assert fused_pairs(other) == {}


def test_copies_have_pairs_of_their_own(calls: list[str]) -> None:
    model, ids = _model("opt", torch.device("cpu")), _ids(torch.device("cpu"))
    twin = copy.deepcopy(model)
    for mine, its in zip(fused_pairs(model).values(), fused_pairs(twin).values(), strict=True):
        assert its.source is not mine.source
    expected = model(ids).logits
    del model
    assert torch.equal(twin(ids).logits, expected)
    assert len(calls) == 4


@torch.no_grad()
def test_compiled_models_compute_one_by_one(calls: list[str]) -> None:
    model, ids = _model("opt", torch.device("cpu")), _ids(torch.device("cpu"))
    expected = model(ids, use_cache=False).logits
    calls.clear()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(ids, use_cache=False).logits, expected)
    assert calls == []


@pytest.mark.parametrize("family", ["opt", "bloom"])
def test_checkpoints_load_fused_and_save_as_they_were(
    device: torch.device,
    family: str,
    tiny_model: Callable[[str], Path],
    calibrated: Callable[[str], Path],
    tmp_path: Path,
    calls: list[str],
) -> None:
    quantize_model(
        str(tiny_model(family)),
        load_recipe("flatten-o1"),
        tmp_path / "first",
        calibration=calibrated(family),
        options=QuantizeOptions(),
    )
    model, ids = quantkit.load(str(tmp_path / "first"), device=str(device), dtype=torch.float16), _ids(device)
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.prepare()
    fused = model(ids).logits
    assert len(calls) == 2
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path / "second")
    again = quantkit.load(str(tmp_path / "second"), device=str(device), dtype=torch.float16)
    _apart(again)
    assert (fused - again(ids).logits).float().norm() <= LOGIT_RTOL * fused.float().norm()


def test_a_model_without_its_head_is_fused_too(calls: list[str]) -> None:
    body = _model("opt", torch.device("cpu")).model
    before = len(fused_pairs(body))
    for block in body.decoder.layers:  # as if AutoModel had built it
        block.activation_fn = block.activation_fn.inner
    fuse_chains(body)
    body(_ids(torch.device("cpu")))
    assert before == 2
    assert calls == ["relu"] * 2


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_captured_pass_gives_the_same_bits(name: str) -> None:
    model, ids = _model(name, torch.device("cuda")), _ids(torch.device("cuda"), 3, 23)
    first, second = (model(ids, use_cache=False).logits for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), FilledScalars():
        captured = model(ids, use_cache=False).logits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(first, second)
    assert torch.equal(first, captured)


@pytest.mark.cuda
@torch.no_grad()
def test_y_is_never_in_memory() -> None:
    rows, width, like = 8192, 4096, torch.empty(0, dtype=torch.float16, device="cuda")
    source = random_flatten_linear(FlattenSpec(8, 8, 96), (width, 64), like)
    target = random_flatten_linear(FlattenSpec(8, 8, 5120), (64, width), like)
    pair = FusedPair(("a", "b", "c"), source, PassingActivation(nn.ReLU()), target, "relu")
    x = torch.randn(rows, 64, dtype=torch.float16, device="cuda")
    expected = target(source(x).relu())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = target(pair(x))
    assert torch.cuda.max_memory_allocated() - before < rows * width * 2
    assert torch.equal(y, expected)


def test_wrong_codes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model("opt", torch.device("cpu"))
    check_pairs(model, "tiny")
    real = FusedPair.codes
    monkeypatch.setattr(FusedPair, "codes", lambda pair, x: real(pair, -x))
    with pytest.raises(BenchError, match=r"tiny, model\.decoder\.layers\.0: .* of the fused codes differ"):
        check_pairs(model, "tiny")
