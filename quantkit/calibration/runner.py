"""Collecting a calibration artifact: block by block over the windows, a collector on every block Linear's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantkit import __version__
from quantkit.calibration.artifact import STATS_FIELDS, Calibration, CalibrationMeta, TextSource
from quantkit.calibration.collectors import Collector, RoutedCollector, sample_positions
from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, shuffled_windows, tokenize
from quantkit.errors import ModelError, StatsError
from quantkit.models.experts import expert_linears
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.loading import is_quantized, stream_fingerprint
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, fast_products, state_room, stored_inputs
from quantkit.models.watching import watch_block
from quantkit.progress import track
from quantkit.ranks import ALONE, Ranks
from quantkit.stats import LayerStats
from quantkit.storage.resume import Commits, Workspace, passing_workspace, shared_workspace

Keep = Callable[[Mapping[str, Any]], AbstractContextManager[Workspace]]
"""What a work is of -> where its finished pieces stand while it lasts."""


def calibrate(
    stream: ModelStream,
    tokenizer: Any,
    corpus: Corpus,
    *,
    name: str,
    windows: int,
    seq_len: int,
    seed: int,
    activations: torch.dtype = torch.float32,
    keep: Keep = passing_workspace,
    ranks: Ranks = ALONE,
) -> Calibration | None:
    """Statistics of every Linear of the decoder blocks over seeded windows of the corpus.

    Experts are calibrated by the tokens routed to them.
    name: what the artifact calls the model. activations: what hidden states are stored in between blocks.
    ranks: those that share the windows; the first gets the result, the others None.
    Raises ModelError (also for a quantized model) and DataError before the pass; StatsError, naming the layer, for
    NaN or Inf in an activation.
    """
    model = stream.model
    if is_quantized(model):
        raise ModelError(f"model {name} is quantized already; calibrate the floating-point model that it was made from")
    block_linears(model)
    check_seq_len(seq_len, model)
    ids = tokenize(tokenizer, corpus.text, name=corpus.name)
    check_vocabulary(ids, model, name=corpus.name)
    chosen = shuffled_windows(ids, seq_len, windows, seed=seed, name=corpus.name)
    text = TextSource(name=corpus.name, sha256=corpus.sha256, seed=seed, windows=windows)
    found = ranks.lead(lambda: stream_fingerprint(stream))
    identity = {
        "version": __version__,
        "model": found,
        "text": {**asdict(text), "tokens": sha256(chosen.to(torch.int32).numpy().tobytes()).hexdigest()},
        "activations": str(activations),
        "device": stream.device.type,
    }
    with shared_workspace(ranks, lambda: keep(identity)) as work:
        layers = collect(stream, chosen, seed=seed, activations=activations, work=work, ranks=ranks)
    if layers is None:
        return None
    meta = CalibrationMeta(model=name, fingerprint=found, texts=(text,), seq_len=seq_len, quantkit=__version__)
    return Calibration(layers, chosen.to(torch.int32), meta)


@torch.no_grad()
def collect(
    stream: ModelStream,
    windows: Tensor,
    *,
    seed: int,
    activations: torch.dtype,
    work: Workspace,
    ranks: Ranks = ALONE,
) -> dict[str, LayerStats] | None:
    """LayerStats of each Linear over windows [n, seq_len]; Linears fed by one tensor share one object.

    seed: of the sample of rows. work: each block is a piece of it. ranks: None is for those but the first.
    Raises StatsError for NaN, Inf, or a Linear that is not run on every token, other than an expert's.
    """
    linears, last = block_linears(stream.model), len(stream.blocks) - 1
    positions, experts = sample_positions(windows.numel(), seed), expert_linears(stream.model)

    def new(name: str, columns: int) -> Collector:
        if name in experts:
            return RoutedCollector(name, columns, seed, stream.device)
        return Collector(name, columns, positions, stream.device)

    begun = work.finished
    with fast_products(stream.device), Commits(work, ranks, stream.device) as commits:
        inputs = None
        if begun <= last:
            inputs = stored_inputs(stream, windows, work, activations, first=0, ranks=ranks)
        for index in track(range(begun, last + 1), "calibrate"):
            assert inputs is not None
            prefix, _ = stream.blocks[index]
            own = {name: module for name, module in linears.items() if stream.owner(name) == prefix}
            following, hidden = None, inputs.hidden
            if index < last:
                following = state_room(stream.device, work, index + 1, tuple(hidden.shape), hidden.dtype)
            with stream.block(index) as block:
                stats, aliases = _collect_block(block, own, inputs, index, following, new, ranks)
            tensors = {f"{name}:{field}": getattr(one, field) for name, one in stats.items() for field in STATS_FIELDS}
            tokens = {name: one.tokens for name, one in stats.items()}
            commits.commit(tensors, {"aliases": aliases, "tokens": tokens}, following)
            if following is not None:
                inputs = inputs.with_hidden(following)
    return _read_back(work, list(linears)) if ranks.leads else None


def _collect_block(
    block: nn.Module,
    linears: Mapping[str, nn.Module],
    inputs: BlockInputs,
    index: int,
    following: Tensor | None,
    new: Callable[[str, int], Collector],
    ranks: Ranks,
) -> tuple[dict[str, LayerStats], dict[str, str]]:
    """(statistics by the first Linear of each input, that Linear for each) of one block; its outputs in following.

    new: (name, columns) -> a collector for such an input.
    """
    collectors: dict[str, Collector] = {}

    def update(name: str, x: Tensor) -> None:
        if name not in collectors:
            collectors[name] = new(name, x.shape[1])
        collectors[name].update(x)

    watched = watch_block(block, inputs, index, [(linears, update)], into=following, ranks=ranks)
    for name, module in linears.items():
        if name not in watched.aliases:
            if not isinstance(new(name, 1), RoutedCollector):
                raise StatsError(f"{name}: the model never runs it, so there is nothing to calibrate on")
            if watched.owner(name, module) == ranks.number:
                collectors[name] = new(name, linear_shape(module)[1])
    tokens = inputs.hidden.shape[0] * inputs.hidden.shape[1]
    own = {name: collector.result(tokens) for name, collector in collectors.items()}
    found = {name: stats for each in ranks.collect(own) for name, stats in each.items()}
    owners = dict.fromkeys(watched.aliases[name] for name in linears)
    return {name: found[name] for name in owners}, {name: watched.aliases[name] for name in linears}


def _read_back(work: Workspace, names: list[str]) -> dict[str, LayerStats]:
    found: dict[str, LayerStats] = {}
    for number in range(work.finished):
        tensors, document = load_file(work.piece(number)), work.document(number)
        stats = {
            name: LayerStats(**{field: tensors[f"{name}:{field}"] for field in STATS_FIELDS}, tokens=tokens)
            for name, tokens in document["tokens"].items()
        }
        found |= {name: stats[owner] for name, owner in document["aliases"].items()}
    return {name: found[name] for name in names}
