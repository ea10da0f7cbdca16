"""Tuning end to end on tiny models: never worse on held-out windows, deterministic, nothing else changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit.errors import RecipeError, StatsError
from quantkit.models.experts import separate_experts
from quantkit.models.families import block_linears, linear_bias, linear_weight
from quantkit.models.logits import log_probabilities
from quantkit.models.structure import embedding_matrices
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.quantizers.base import LayerInput
from quantkit.quantizers.bcq.quantizer import BcqSettings, quantize
from quantkit.quantizers.trellis import quantizer as trellis
from quantkit.tuning.install import Tuned, tunable
from quantkit.tuning.optimize import split_windows
from quantkit.tuning.part import expanded_once
from quantkit.tuning.settings import TuneSettings, tune_settings
from quantkit.tuning.target import Target
from quantkit.tuning.whole_model import divergence_loss, tokens_of_graph, tune_model, tuning_bytes
from tests.tiny import VOCABULARY, build_model

SETTINGS = TuneSettings(epochs=4, batch=2, codes=True, rate=0.01, code_rate=0.01)
WINDOWS, SEQ_LEN = 12, 16
# Held-out losses are means of fp32 sums in two orders of windows.
LOSS_RTOL = 1e-4
# Length of a step along the gradient. The error falls with its square: 3 % at 1e-2, 0.3 % at 3e-3; at 1e-3 fp32's
# rounding of the loss adds about 0.1 %.
STEP = 1e-3
SLOPE_RTOL = 0.01


def models(family: str, bits: int = 2) -> tuple[Any, Any]:
    """(original, its quantized twin)."""
    original = build_model(family).eval()
    separate_experts(original)
    twin = copy.deepcopy(original)
    for name, module in block_linears(twin).items():
        layer = LayerInput(name, linear_weight(module).detach().float().contiguous())
        packed = quantize(layer, BcqSettings(weight_bits=bits, group_size=32))
        twin.set_submodule(name, QuantizedLinear.from_packed(packed, linear_bias(module), torch.float32))
    return original, twin


def trellis_twin(original: Any) -> Any:
    """A twin in the trellis format."""
    twin = copy.deepcopy(original)
    for name, module in block_linears(twin).items():
        layer = LayerInput(name, linear_weight(module).detach().float().contiguous())
        packed = trellis.quantize(layer, trellis.TrellisSettings(weight_bits=2, taps=4, compensate=False))
        twin.set_submodule(name, QuantizedLinear.from_packed(packed, linear_bias(module), torch.float32))
    return twin


def text() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (WINDOWS, SEQ_LEN))


def slopes(tuned: Tuned, loss: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """(length of the gradient of all that is tuned, difference quotient along it)."""
    tensors = [*tuned.others.values(), *(p for part in tuned.parts.values() for p in part.parameters())]
    loss().backward()
    gradients = [p.grad.clone() for p in tensors if p.grad is not None]
    assert len(gradients) == len(tensors)
    slope = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    ends = []
    with torch.no_grad():
        for step in (STEP, -2 * STEP):
            for parameter, gradient in zip(tensors, gradients, strict=True):
                parameter.add_(gradient / slope, alpha=step)
            ends.append(loss().item())
    return slope.item(), (ends[0] - ends[1]) / (2 * STEP)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "bloom", "qwen3_moe", "lfm2"])
def test_tuning_lowers_the_held_out_divergence(family: str) -> None:
    original, model = models(family)
    windows = text()
    held_out = windows[split_windows(WINDOWS, SETTINGS.held_out)[1]]
    before = divergence_loss(log_probabilities(original, held_out), model, held_out).item()
    report = tune_model(original, model, windows, SETTINGS, dtype=torch.float32)
    after = divergence_loss(log_probabilities(original, held_out), model, held_out).item()
    assert report.before == pytest.approx(before, rel=LOSS_RTOL)
    assert report.after == pytest.approx(after, rel=LOSS_RTOL)
    assert report.kept > 0
    assert after < before
    assert all(isinstance(model.get_submodule(name), QuantizedLinear) for name in block_linears(original))


def test_scales_of_the_trellis_format_are_tuned_and_nothing_else_of_it() -> None:
    original = build_model("opt").eval()
    model = trellis_twin(original)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = TuneSettings(epochs=4, batch=2, rate=0.01)
    report = tune_model(original, model, text(), settings, dtype=torch.float32)
    assert report.after < report.before
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"scales", "bias", "weight"}  # weight: of norms


@pytest.mark.parametrize("family", ["llama", "opt", "lfm2"])
def test_the_gradient_of_the_divergence_is_that_of_finite_differences(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the gradient of scales, offsets, biases, norms and embeddings together, without the rounding of scales."""
    original, model = models(family)
    tokens = text()
    wanted = log_probabilities(original, tokens).detach()
    monkeypatch.setattr("quantkit.quantizers.bcq.scales.ScaleGrid.round_scales", lambda _grid, scales: scales)
    monkeypatch.setattr("quantkit.quantizers.bcq.scales.ScaleGrid.round_offset", lambda _grid, offset: offset)
    with tunable(model, None, embedding_matrices(model)) as tuned:
        assert any(parameter.ndim == 2 for parameter in tuned.others.values())
        slope, difference = slopes(tuned, lambda: divergence_loss(wanted, model, tokens))
    assert difference == pytest.approx(slope, rel=SLOPE_RTOL)


class HostReads(TorchDispatchMode):
    """Counts how often a value is read from a tensor, for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("held", [True, False], ids=["held", "read-again"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_a_loss_reads_no_value_so_that_its_steps_can_be_captured(family: str, held: bool) -> None:
    original, model = models(family)
    windows, numbers = text(), torch.tensor([7, 2, 11])
    target = Target(original, windows, at_once=5, held=held)
    with tunable(model, None) as tuned, expanded_once(list(tuned.parts.values())), HostReads() as reads:
        loss = divergence_loss(target.log_probabilities(numbers), model, windows[numbers])
        loss.backward()
    assert reads.count == 0
    with HostReads() as reads:
        loss.item()
    assert reads.count == 1


@pytest.mark.parametrize("codes", [True, False], ids=["codes", "fixed"])
def test_tuning_that_makes_it_worse_is_dropped(codes: bool) -> None:
    original, model = models("opt", bits=6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wild = TuneSettings(epochs=2, batch=2, rate=3.0, code_rate=3.0, codes=codes)
    report = tune_model(original, model, text(), wild, dtype=torch.float32)
    assert (report.kept, report.after) == (0, report.before)
    assert min(report.passes) >= report.before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_tuning_is_deterministic() -> None:
    windows, results = text(), []
    for _ in range(2):
        torch.manual_seed(1)
        original, model = models("llama")
        torch.rand(7)  # the global generator is not what decides
        tune_model(original, model, windows, SETTINGS, dtype=torch.float16)
        results.append(model.state_dict())
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), name


def test_passes_behind_tuned_blocks_have_rates_and_windows_per_step_of_their_own() -> None:
    windows, results = text(), []
    small, large = {"rate": 0.01, "code_rate": 0.02}, {"epoch_rate": 3.0, "epoch_code_rate": 3.0}
    swapped = {"rate": 3.0, "code_rate": 3.0, "epoch_rate": 0.01, "epoch_code_rate": 0.02}
    for settings in (
        TuneSettings(epochs=2, batch=2, epoch_batch=1, codes=True, **small, **large),
        TuneSettings(epochs=2, batch=2, codes=True, **swapped, blocks=1),
        TuneSettings(epochs=2, batch=1, epoch_batch=2, codes=True, **swapped, blocks=1),
    ):
        torch.manual_seed(1)
        original, model = models("llama")
        report = tune_model(original, model, windows, settings, dtype=torch.float32)
        assert report.kept > 0
        results.append(model.state_dict())
    for name, tensor in results[0].items():
        assert all(torch.equal(tensor, other[name]) for other in results[1:]), name


def test_stderr_shows_what_every_pass_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    original, model = models("llama")
    report = tune_model(original, model, text(), SETTINGS, dtype=torch.float32)
    lines = [line for line in capsys.readouterr().err.splitlines() if "held-out loss" in line]
    least = [min((report.before, *report.passes[:number])) for number in range(SETTINGS.epochs)]
    assert lines == [
        f"quantkit: pass {number} of 4: held-out loss {loss:.4g}, least before {before:.4g}"
        for number, (loss, before) in enumerate(zip(report.passes, least, strict=True), 1)
    ]


def test_the_loss_of_windows_that_were_tuned_on_is_told_beside_that_of_the_held_out_ones() -> None:
    """On few windows, after many passes, it is far below."""
    original, model = models("llama")
    windows = text()
    many = TuneSettings(epochs=12, batch=2, rate=0.01, code_rate=0.01, codes=True, held_out=0.4)
    report = tune_model(original, model, windows, many, dtype=torch.float32)
    used, held_out = split_windows(len(windows), 0.4)
    found = []
    for numbers in (used[-len(held_out) :], held_out):
        wanted = log_probabilities(original, windows[numbers])
        found.append(divergence_loss(wanted, model, windows[numbers]).item())
    assert found == pytest.approx([report.seen, report.after], rel=1e-4)  # fp32, and so many windows at a time
    assert report.seen < 0.8 * report.after


def test_codes_stay_where_only_scales_are_tuned() -> None:
    original, model = models("opt")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tune_model(original, model, text(), TuneSettings(epochs=2, rate=0.01), dtype=torch.float32)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    kinds = {name.rpartition(".")[2] for name in changed}
    assert {"scales", "offset", "bias", "weight"} == kinds  # weight: of norms
    assert not any(name.endswith(("embed_tokens.weight", "embed_positions.weight")) for name in changed)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"], ids=["tied", "apart"])
def test_embeddings_and_head_are_tuned_where_that_is_asked_for(family: str) -> None:
    original, model = models(family)
    matrices = set(embedding_matrices(model))
    assert len(matrices) == (1 if family == "llama" else 2)
    before = {n: tensor.clone() for n, tensor in model.named_parameters() if tensor.ndim == 2 and n.endswith("weight")}
    settings = TuneSettings(epochs=2, batch=2, rate=0.01, embeddings=True)
    report = tune_model(original, model, text(), settings, dtype=torch.bfloat16)
    assert report.after < report.before
    after = dict(model.named_parameters())
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == matrices
    for name in matrices:
        assert torch.equal(after[name], after[name].bfloat16().float()), name
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (family == "llama")


def test_a_graph_holds_more_tokens_on_a_gpu_whose_memory_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cpu, gpu = build_model("llama"), torch.device("cpu"), torch.device("cuda")
    sizes = model, 10**6, 10**4, TuneSettings()
    assert tokens_of_graph(*sizes, cpu) == 2048
    for tokens in (8192, 4096, 2048):
        memory = tuning_bytes(*sizes, at_once=tokens) / 0.6 + 1
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device, found=properties: found)
        assert tokens_of_graph(*sizes, gpu) == tokens
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=1))
    assert tokens_of_graph(*sizes, gpu) == 2048


def test_tuned_embeddings_take_memory() -> None:
    model = build_model("llama")
    (matrix,) = embedding_matrices(model).values()
    plain, more = (
        tuning_bytes(model, 10**6, 10**4, TuneSettings(embeddings=embeddings), at_once=2048)
        for embeddings in (False, True)
    )
    assert more - plain == 24 * matrix.numel()


def test_norms_and_biases_are_what_their_dtype_holds() -> None:
    original, model = models("opt")
    tune_model(original, model, text(), SETTINGS, dtype=torch.float16)
    vectors = {name: tensor for name, tensor in model.state_dict().items() if tensor.ndim == 1}
    assert vectors
    for name, tensor in vectors.items():
        assert torch.equal(tensor, tensor.half().float()), name


def test_the_last_windows_are_held_out() -> None:
    used, held_out = split_windows(32, 0.125)
    assert used.tolist() == list(range(28))
    assert held_out.tolist() == [28, 29, 30, 31]
    assert [len(part) for part in split_windows(2, 0.9)] == [1, 1]
    with pytest.raises(StatsError, match="2 windows or more"):
        split_windows(1, 0.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, " has no setting 'epoch'; did you mean"),
        ({"batch": 1.5}, "batch is 1.5, expected int"),
        ({"codes": 1}, "codes is 1, expected bool"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"batch": 0}, "batch is 0"),
        ({"held_out": 1}, "held_out is 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"logits": True}, "logits is true, but blocks is 0"),
        ({"logits": True, "blocks": 1, "blend": 0.5}, "logits is true, but blend is 0.5; choose 1"),
        ({"embeddings": True, "blocks": 1, "epochs": 0}, "embeddings is true, but epochs is 0"),
        ({"epoch_rate": -0.1}, "epoch_rate is -0.1; choose 0 or more"),
        ({"epoch_code_rate": -0.1}, "epoch_code_rate is -0.1; choose 0 or more"),
        ({"epoch_batch": -1}, "epoch_batch is -1; choose 0 or more"),
    ],
    ids=[
        "unknown",
        "float",
        "int",
        "nan",
        "batch",
        "held_out",
        "nothing",
        "logits",
        "logits-blend",
        "embeddings-of-no-passes",
        "negative",
        "negative-codes",
        "negative-batch",
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"recipe r: tune.*{message}"):
        tune_settings("r", values)
