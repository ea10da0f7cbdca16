"""Calibrating tiny models of every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantkit.calibration.artifact import Calibration, check_model
from quantkit.calibration.runner import calibrate, vocabulary_windows
from quantkit.data.corpora import Corpus
from quantkit.errors import DataError, ModelError, StatsError
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.loading import load_model
from quantkit.models.stream import in_memory_stream
from quantkit.stats import SAMPLE_ROWS

RTOL = {"cpu": 1e-5, "cuda": 4e-3}  # fp32 sums in another order; blocks multiply in TF32 on a GPU


def _run(model: torch.nn.Module, tokenizer: object, corpus: Corpus, windows: int = 3) -> Calibration:
    return calibrate(in_memory_stream(model), tokenizer, corpus, name="tiny", windows=windows, seq_len=64, seed=0)


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_every_linear_gets_the_statistics_of_its_input(
    family: str, tiny_model: Callable[[str], Path], corpus: Corpus, device: torch.device
) -> None:
    model, tokenizer = load_model(str(tiny_model(family)), device=device)
    calibration = _run(model, tokenizer, corpus)
    linears = block_linears(model)
    assert list(calibration.layers) == list(linears)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    for name, module in linears.items():
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].reshape(-1, args[0].shape[-1]))
        )
    with torch.no_grad():
        for window in calibration.windows.split(1):
            model(window.long().to(device))
    rtol = RTOL[device.type]
    for name, module in linears.items():
        x, stats = torch.cat(seen[name]).cpu(), calibration.layers[name]
        assert stats.absmax.shape == (linear_shape(module)[1],)
        assert stats.tokens == len(x) == 192
        torch.testing.assert_close(stats.absmax, x.abs().amax(0), rtol=rtol, atol=rtol)
        torch.testing.assert_close(stats.mean_square, x.square().mean(0), rtol=rtol, atol=1e-8)
        assert stats.sample.shape == (SAMPLE_ROWS, x.shape[1])
        assert int(stats.histogram.sum()) == x.numel()


def test_origin_is_recorded(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    meta = _run(model, tokenizer, corpus).meta
    assert (meta.model, meta.seq_len, meta.tokens) == ("tiny", 64, 192)
    (source,) = meta.texts
    assert (source.name, source.sha256, source.seed, source.windows) == ("sample.txt", corpus.sha256, 0, 3)
    check_model(_run(model, tokenizer, corpus), model)


def test_linears_with_one_input_share_their_statistics(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("opt")))
    layers = _run(model, tokenizer, corpus).layers
    prefix = "model.decoder.layers.0.self_attn"
    assert layers[f"{prefix}.q_proj"] is layers[f"{prefix}.k_proj"] is layers[f"{prefix}.v_proj"]
    assert layers[f"{prefix}.out_proj"] is not layers[f"{prefix}.q_proj"]


def test_quantized_model_is_refused(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    model.config.quantization_config = {"quant_method": "quantkit"}
    with pytest.raises(ModelError, match="model tiny is quantized already"):
        _run(model, tokenizer, corpus)


def test_short_text_is_refused_with_both_counts(tiny_model: Callable[[str], Path]) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    with pytest.raises(DataError, match=r"\d+ tokens, but one window takes 64"):
        _run(model, tokenizer, Corpus("short", ("a line of text",)))


def test_overflow_names_the_first_layer_that_sees_it(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("inf"))
    with pytest.raises(StatsError, match=r"model\.layers\.0\.mlp\.down_proj: its input holds NaN or Inf"):
        _run(model, tokenizer, corpus)


def test_vocabulary_widens_the_reach_and_nothing_else(tiny_model: Callable[[str], Path], corpus: Corpus) -> None:
    model, tokenizer = load_model(str(tiny_model("llama")))
    windows = vocabulary_windows(tokenizer, model, 64, 2, seed=0)
    tokens = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    whole = vocabulary_windows(tokenizer, model, 64, 100, seed=0)
    assert windows.shape == (2, 64)
    assert torch.equal(whole[:2], windows)
    assert set(whole.flatten().tolist()) == set(range(tokens))
    name = "model.layers.0.mlp.down_proj"
    stats = _run(model, tokenizer, corpus, windows=2).layers[name]
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _module, given: seen.append(given[0].abs()))
    with torch.no_grad():
        model(windows)
    handle.remove()
    assert stats.vocabulary_absmax is not None
    torch.testing.assert_close(stats.vocabulary_absmax, seen[0].amax(dim=(0, 1)), rtol=1e-4, atol=1e-6)
    assert stats.tokens == 2 * 64
    assert torch.equal(stats.reach(), stats.absmax.maximum(stats.vocabulary_absmax))
