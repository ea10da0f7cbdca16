"""Collecting a calibration artifact: block by block over the windows, a collector on every block Linear's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantkit import __version__
from quantkit.calibration.artifact import STATS_FIELDS, Calibration, CalibrationMeta, TextSource
from quantkit.calibration.collectors import Collector, RoutedCollector, sample_positions
from quantkit.calibration.prefix import find_prefix
from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, shuffled_windows, tokenize
from quantkit.errors import ModelError, StatsError
from quantkit.models.experts import expert_linears
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.inputs import InputTap
from quantkit.models.loading import is_quantized, stream_fingerprint
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, advance, run_block, stored_inputs
from quantkit.progress import track
from quantkit.stats import LayerStats
from quantkit.storage.resume import Workspace, passing_workspace

Keep = Callable[[Mapping[str, Any]], AbstractContextManager[Workspace]]
"""What a work is of -> where its finished pieces stand while it lasts."""

ACTIVATIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What hidden states are stored in between blocks, by the name that a user gives."""


def check_activations(activations: str) -> None:
    """Raise ModelError for a dtype that hidden states are not stored in."""
    if activations not in ACTIVATIONS:
        raise ModelError(f"`activations` {activations}: choose {' or '.join(ACTIVATIONS)}")


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
    prefix: bool = False,
    keep: Keep = passing_workspace,
) -> Calibration:
    """Statistics of every Linear of the decoder blocks over seeded windows of the corpus.

    Experts are calibrated by the tokens routed to them.
    name: what the artifact calls the model. prefix: look for tokens that take massive channels, collect behind them.
    activations: what hidden states are stored in between blocks.
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
    ahead = find_prefix(stream, tokenizer, chosen) if prefix else ()
    vocabulary = vocabulary_windows(tokenizer, model, seq_len, windows, seed=seed)
    text = TextSource(name=corpus.name, sha256=corpus.sha256, seed=seed, windows=windows)
    found = stream_fingerprint(stream)
    identity = {
        "version": __version__,
        "model": found,
        "text": {**asdict(text), "tokens": _digest(chosen)},
        "vocabulary": _digest(vocabulary),
        "prefix": list(ahead),
        "activations": str(activations),
        "device": stream.device.type,
    }
    with keep(identity) as work:
        layers = collect(stream, chosen, vocabulary, ahead=ahead, seed=seed, activations=activations, work=work)
    meta = CalibrationMeta(name, found, (text,), seq_len, __version__, ahead)
    return Calibration(layers, chosen.to(torch.int32), meta)


@torch.no_grad()
def collect(
    stream: ModelStream,
    windows: Tensor,
    vocabulary: Tensor,
    *,
    ahead: tuple[int, ...] = (),
    seed: int,
    activations: torch.dtype,
    work: Workspace,
) -> dict[str, LayerStats]:
    """LayerStats of each Linear over windows [n, seq_len]; Linears fed by one tensor share one object.

    vocabulary: windows [m, seq_len] for ``vocabulary_absmax`` alone. ahead: tokens before every window, not counted.
    seed: of the sample of rows. work: each block is a piece of it.
    Raises StatsError for NaN, Inf, or a Linear that is not run on every token, other than an expert's.
    """
    linears, last = block_linears(stream.model), len(stream.blocks) - 1
    positions, experts = sample_positions(windows.numel(), seed), expert_linears(stream.model)

    def new(name: str, columns: int) -> Collector:
        if name in experts:
            return RoutedCollector(name, columns, seed, stream.device)
        return Collector(name, columns, positions, stream.device)

    every = torch.cat([windows, vocabulary])
    every = torch.cat([torch.tensor(ahead, dtype=every.dtype).expand(len(every), -1), every], dim=1)
    inputs = stored_inputs(stream, every, work, activations, first=0) if work.finished <= last else None
    for index in track(range(work.finished, last + 1), "calibrate"):
        assert inputs is not None
        prefix, _ = stream.blocks[index]
        own = {name: module for name, module in linears.items() if stream.owner(name) == prefix}
        following = None if index == last else work.state(index + 1, tuple(inputs.hidden.shape), activations)
        with stream.block(index) as block:
            stats, aliases = _collect_block(block, own, inputs, index, following, new, _Rows(len(windows), len(ahead)))
        tensors = {f"{name}:{field}": getattr(one, field) for name, one in stats.items() for field in STATS_FIELDS}
        tokens = {name: one.tokens for name, one in stats.items()}
        work.commit(tensors, {"aliases": aliases, "tokens": tokens}, following)
        if following is not None:
            inputs = inputs.with_hidden(following)
    return _read_back(work, list(linears))


@dataclass(frozen=True)
class _Rows:
    """windows: how many of those that run are text; the others are of the vocabulary. ahead: tokens before each.

    Where tokens stand ahead, no Linear is an expert's, so each sees a window's tokens in order.
    """

    windows: int
    ahead: int


def _collect_block(
    block: nn.Module,
    linears: Mapping[str, nn.Module],
    inputs: BlockInputs,
    index: int,
    following: Tensor | None,
    new: Callable[[str, int], Collector],
    rows: _Rows,
) -> tuple[dict[str, LayerStats], dict[str, str]]:
    """(statistics by the first Linear of each input, that Linear for each) of one block; its outputs in following.

    new: (name, columns) -> a collector for such an input.
    """
    collectors: dict[str, Collector] = {}

    def collector(name: str, x: Tensor) -> Collector:
        if name not in collectors:
            collectors[name] = new(name, x.shape[1])
        return collectors[name]

    def update(name: str, x: Tensor) -> None:
        collector(name, x).update(x[rows.ahead :])

    def reach(name: str, x: Tensor) -> None:
        collector(name, x).reach(x[rows.ahead :])

    aliases: dict[str, str] = {}
    for consume, part in ((update, slice(rows.windows)), (reach, slice(rows.windows, None))):
        with InputTap(linears, consume) as tap:
            _run(block, inputs.with_hidden(inputs.hidden[part]), index, None if following is None else following[part])
        aliases = tap.aliases | aliases
    for name, module in linears.items():
        if name not in aliases:
            aliases[name], collectors[name] = name, new(name, linear_shape(module)[1])
            if not isinstance(collectors[name], RoutedCollector):
                raise StatsError(f"{name}: the model never runs it, so there is nothing to calibrate on")
    tokens = rows.windows * (inputs.hidden.shape[1] - rows.ahead)
    return {name: collector.result(tokens) for name, collector in collectors.items()}, aliases


def _run(block: nn.Module, inputs: BlockInputs, index: int, following: Tensor | None) -> None:
    """Run a block over all windows; its outputs in following, if there is one."""
    if following is None:
        for _ in run_block(block, inputs, index):
            pass
    else:
        advance(block, inputs, index, following)


def vocabulary_windows(tokenizer: Any, model: Any, seq_len: int, most: int, *, seed: int) -> Tensor:
    """Up to ``most`` windows [m, seq_len] of the vocabulary's tokens in random order: all of them once, if they fit.

    A text unlike the calibration's brings other tokens, and some of them reach much further than all of the
    calibration. Where windows are left over, the last one is filled from the start.
    """
    tokens = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    count = min(-(-tokens // seq_len), most)
    return order.repeat(-(-count * seq_len // tokens))[: count * seq_len].view(count, seq_len)


def _digest(windows: Tensor) -> str:
    return sha256(windows.to(torch.int32).numpy().tobytes()).hexdigest()


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
