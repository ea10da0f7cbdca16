"""Collecting a calibration artifact: one pass over the windows with a collector on every block Linear's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit import __version__
from quantkit.calibration.artifact import Calibration, CalibrationMeta, TextSource
from quantkit.calibration.collectors import Collector, sample_positions
from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, shuffled_windows, tokenize
from quantkit.errors import ModelError, StatsError
from quantkit.models.families import block_linears, model_body
from quantkit.models.inputs import InputTap
from quantkit.models.loading import fingerprint, is_quantized
from quantkit.progress import track
from quantkit.stats import LayerStats


def calibrate(
    model: Any, tokenizer: Any, corpus: Corpus, *, name: str, windows: int, seq_len: int, seed: int
) -> Calibration:
    """Statistics of every Linear of the decoder blocks over seeded windows of the corpus.

    name: what the artifact calls the model. Runs on the model's device, one window at a time.
    Raises ModelError (also for a quantized model) and DataError before the pass; StatsError, naming the layer, for
    NaN or Inf in an activation.
    """
    if is_quantized(model):
        raise ModelError(f"model {name} is quantized already; calibrate the floating-point model that it was made from")
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

    seed: of the sample of rows. Raises StatsError for NaN, Inf, or a Linear that is not run on every token.
    """
    positions = sample_positions(windows.numel(), seed)
    collectors: dict[str, Collector] = {}

    def update(name: str, x: Tensor) -> None:
        if name not in collectors:
            collectors[name] = Collector(name, x.shape[1], positions, x.device)
        collectors[name].update(x)

    body, device = model_body(model), next(model.parameters()).device
    with InputTap(linears, update) as tap:
        for window in track(windows.split(1), "calibrate", total=len(windows)):
            body(window.to(device, torch.long), use_cache=False)
    results = {name: collector.result(windows.numel()) for name, collector in collectors.items()}
    silent = [name for name in linears if name not in tap.aliases]
    if silent:
        raise StatsError(f"{silent[0]}: the model never runs it, so there is nothing to calibrate on")
    return {name: results[tap.aliases[name]] for name in linears}
