"""Collecting a calibration artifact: one pass over the windows with a collector on every block Linear's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit import __version__
from quantkit.calibration.artifact import Calibration, CalibrationMeta, TextSource
from quantkit.calibration.collectors import Collector, RoutedCollector, sample_positions
from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, shuffled_windows, tokenize
from quantkit.errors import ModelError, StatsError
from quantkit.models.experts import expert_linears, separate_experts
from quantkit.models.families import block_linears, linear_shape, model_body
from quantkit.models.inputs import InputTap
from quantkit.models.loading import fingerprint, is_quantized
from quantkit.progress import track
from quantkit.stats import LayerStats


def calibrate(
    model: Any, tokenizer: Any, corpus: Corpus, *, name: str, windows: int, seq_len: int, seed: int
) -> Calibration:
    """Statistics of every Linear of the decoder blocks over seeded windows of the corpus.

    Fused experts of the model are separated, in place; each is calibrated by the tokens routed to it.
    name: what the artifact calls the model. Runs on the model's device, one window at a time.
    Raises ModelError (also for a quantized model) and DataError before the pass; StatsError, naming the layer, for
    NaN or Inf in an activation.
    """
    if is_quantized(model):
        raise ModelError(f"model {name} is quantized already; calibrate the floating-point model that it was made from")
    separate_experts(model)
    linears = block_linears(model)
    check_seq_len(seq_len, model)
    ids = tokenize(tokenizer, corpus.text, name=corpus.name)
    check_vocabulary(ids, model, name=corpus.name)
    chosen = shuffled_windows(ids, seq_len, windows, seed=seed, name=corpus.name)
    layers = collect(model, linears, chosen, seed=seed)
    text = TextSource(name=corpus.name, sha256=corpus.sha256, seed=seed, windows=windows)
    meta = CalibrationMeta(
        model=name, fingerprint=fingerprint(model), texts=(text,), seq_len=seq_len, quantkit=__version__
    )
    return Calibration(layers, chosen.to(torch.int32), meta)


@torch.no_grad()
def collect(model: nn.Module, linears: dict[str, nn.Module], windows: Tensor, *, seed: int) -> dict[str, LayerStats]:
    """LayerStats of each Linear over windows [n, seq_len]; Linears fed by one tensor share one object.

    seed: of the sample of rows. Raises StatsError for NaN, Inf, or a Linear that is not run on every token, other than
    an expert's.
    """
    positions, routed = sample_positions(windows.numel(), seed), expert_linears(model)
    collectors: dict[str, Collector] = {}
    body, device = model_body(model), next(model.parameters()).device

    def collector(name: str, columns: int) -> Collector:
        if name not in collectors and name in routed:
            collectors[name] = RoutedCollector(name, columns, seed, device)
        elif name not in collectors:
            collectors[name] = Collector(name, columns, positions, device)
        return collectors[name]

    def update(name: str, x: Tensor) -> None:
        collector(name, x.shape[1]).update(x)

    with InputTap(linears, update) as tap:
        for window in track(windows.split(1), "calibrate", total=len(windows)):
            body(window.to(device, torch.long), use_cache=False)
    aliases = dict(tap.aliases)
    for name in linears:
        if name not in aliases and name not in routed:
            raise StatsError(f"{name}: the model never runs it, so there is nothing to calibrate on")
        if name not in aliases:  # an expert that no token was routed to
            aliases[name] = name
            collector(name, linear_shape(linears[name])[1])
    results = {name: own.result(windows.numel()) for name, own in collectors.items()}
    return {name: results[aliases[name]] for name in linears}
