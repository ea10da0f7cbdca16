"""Collecting a calibration artifact: block by block over the windows, a collector on every block Linear's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantkit import __version__
from quantkit.calibration.artifact import STATS_FIELDS, Calibration, CalibrationMeta
from quantkit.calibration.collectors import Collector, RoutedCollector, sample_positions
from quantkit.calibration.drawing import Written, digest, draw_windows
from quantkit.calibration.prefix import find_prefix
from quantkit.calibration.saliency import SaliencyPass, check_takes_saliency, collect_saliency
from quantkit.data.corpora import Corpus
from quantkit.errors import ModelError, StatsError
from quantkit.models.experts import expert_linears
from quantkit.models.families import block_linears, linear_shape
from quantkit.models.loading import is_quantized, stream_fingerprint
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, fast_products, state_room, stored_inputs
from quantkit.models.watching import Watched, watch_block
from quantkit.progress import track
from quantkit.ranks import ALONE, Ranks
from quantkit.stats import LayerStats
from quantkit.storage.commits import Commits
from quantkit.storage.resume import Workspace, passing_workspace, shared_workspace

Keep = Callable[[Mapping[str, Any]], AbstractContextManager[Workspace]]
"""What a work is of -> where its finished pieces stand while it lasts."""


def calibrate(
    stream: ModelStream,
    tokenizer: Any,
    corpus: Corpus | None,
    *,
    name: str,
    windows: int,
    seq_len: int,
    seed: int,
    written: Written | None = None,
    activations: torch.dtype = torch.float32,
    prefix: bool = False,
    saliency: int = 0,
    keep: Keep = passing_workspace,
    ranks: Ranks = ALONE,
) -> Calibration | None:
    """Statistics of every Linear of the decoder blocks over seeded windows of the corpus, or written by the model.

    Experts are calibrated by the tokens routed to them.
    corpus, windows, seq_len, written: as draw_windows takes them, which also says what it raises.
    name: what the artifact calls the model. prefix: look for tokens that take massive channels, collect behind them.
    saliency: groups of output channels per Linear whose gradients are kept too; 0 for none.
    activations: what hidden states are stored in between blocks.
    ranks: those that share the windows; the first gets the result, the others None.
    Raises ModelError for a model that cannot be calibrated, such as a quantized one, before anything is drawn;
    StatsError, naming the layer, for NaN or Inf in an activation.
    """
    model = stream.model
    if is_quantized(model):
        raise ModelError(f"model {name} is quantized already; calibrate the floating-point model that it was made from")
    block_linears(model)
    if saliency:
        check_takes_saliency(model, saliency)
    drawn = draw_windows(
        stream, tokenizer, corpus, windows=windows, seq_len=seq_len, seed=seed, written=written, ranks=ranks
    )
    chosen = drawn.windows
    found_prefix = find_prefix(stream, tokenizer, chosen) if prefix else None
    ahead = found_prefix or ()
    vocabulary = vocabulary_windows(tokenizer, model, seq_len, windows, seed=seed)
    found = ranks.lead(lambda: stream_fingerprint(stream))
    identity = {
        "version": __version__,
        "model": found,
        "texts": [asdict(text) for text in drawn.texts],
        "tokens": digest(chosen),
        "vocabulary": digest(vocabulary),
        "prefix": None if found_prefix is None else list(found_prefix),
        "saliency": saliency,
        "activations": str(activations),
        "device": stream.device.type,
    }
    with shared_workspace(ranks, lambda: keep(identity)) as work:
        text_windows = TextWindows(chosen, vocabulary, ahead)
        layers = collect(stream, text_windows, seed=seed, activations=activations, work=work, ranks=ranks)
        weights: dict[str, Tensor] | None = {}
        if saliency:
            every = text_windows.every()[: len(chosen)]
            weights = collect_saliency(SaliencyPass(stream, every, len(ahead), saliency, activations, work, ranks))
    if layers is None or weights is None:
        return None
    meta = CalibrationMeta(name, found, drawn.texts, seq_len, __version__, found_prefix, saliency)
    return Calibration(layers, chosen.to(torch.int32), meta, weights)


@dataclass(frozen=True)
class TextWindows:
    """text: [n, seq_len]. vocabulary: [m, seq_len], for ``vocabulary_absmax`` alone. ahead: tokens before every window,
    which are not counted."""

    text: Tensor
    vocabulary: Tensor
    ahead: tuple[int, ...] = ()

    def every(self) -> Tensor:
        """All of them [n + m, ahead + seq_len]."""
        every = torch.cat([self.text, self.vocabulary])
        return torch.cat([torch.tensor(self.ahead, dtype=every.dtype).expand(len(every), -1), every], dim=1)


@torch.no_grad()
def collect(
    stream: ModelStream,
    windows: TextWindows,
    *,
    seed: int,
    activations: torch.dtype,
    work: Workspace,
    ranks: Ranks = ALONE,
) -> dict[str, LayerStats] | None:
    """LayerStats of each Linear over the windows; Linears fed by one tensor share one object.

    seed: of the sample of rows. work: each block is a piece of it. ranks: None is for those but the first.
    Raises StatsError for NaN, Inf, or a Linear that is not run on every token, other than an expert's.
    """
    linears, last = block_linears(stream.model), len(stream.blocks) - 1
    positions, experts = sample_positions(windows.text.numel(), seed), expert_linears(stream.model)
    rows = _Rows(len(windows.text), len(windows.ahead), ranks)

    def new(name: str, columns: int) -> Collector:
        if name in experts:
            return RoutedCollector(name, columns, seed, stream.device)
        return Collector(name, columns, positions, stream.device)

    begun = work.finished
    with fast_products(stream.device), Commits(work, ranks, stream.device) as commits:
        inputs = None
        if begun <= last:
            inputs = stored_inputs(stream, windows.every(), work, activations, first=0, ranks=ranks)
        for index in track(range(begun, last + 1), "calibrate"):
            assert inputs is not None
            prefix, _ = stream.blocks[index]
            own = {name: module for name, module in linears.items() if stream.owner(name) == prefix}
            following, hidden = None, inputs.hidden
            if index < last:
                following = state_room(stream.device, work, index + 1, tuple(hidden.shape), hidden.dtype)
            with stream.block(index) as block:
                stats, aliases = _collect_block(block, own, inputs, index, following, new, rows)
            tensors = {f"{name}:{field}": getattr(one, field) for name, one in stats.items() for field in STATS_FIELDS}
            tokens = {name: one.tokens for name, one in stats.items()}
            commits.commit(tensors, {"aliases": aliases, "tokens": tokens}, following)
            if following is not None:
                inputs = inputs.with_hidden(following)
    return _read_back(work, list(linears), last + 1) if ranks.leads else None


@dataclass(frozen=True)
class _Rows:
    """windows: how many of those that run are text; the others are of the vocabulary. ahead: tokens before each.

    ranks: those that share all of them. Where tokens stand ahead, no Linear is an expert's, so each sees a window's
    tokens in order.
    """

    windows: int
    ahead: int
    ranks: Ranks


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

    watched = Watched(rows.ranks)
    for consume, part in ((update, range(rows.windows)), (reach, range(rows.windows, len(inputs.hidden)))):
        watch_block(block, inputs, index, [(linears, consume)], into=following, windows=part, watched=watched)
    for name, module in linears.items():
        if name not in watched.aliases:
            if not isinstance(new(name, 1), RoutedCollector):
                raise StatsError(f"{name}: the model never runs it, so there is nothing to calibrate on")
            if watched.owner(name, module) == rows.ranks.number:
                collectors[name] = new(name, linear_shape(module)[1])
    tokens = rows.windows * (inputs.hidden.shape[1] - rows.ahead)
    own = {name: collector.result(tokens) for name, collector in collectors.items()}
    found = {name: stats for each in rows.ranks.collect(own) for name, stats in each.items()}
    owners = dict.fromkeys(watched.aliases[name] for name in linears)
    return {name: found[name] for name in owners}, {name: watched.aliases[name] for name in linears}


def vocabulary_windows(tokenizer: Any, model: Any, seq_len: int, most: int, *, seed: int) -> Tensor:
    """Up to ``most`` windows [m, seq_len] of the vocabulary's tokens in random order: all of them once, if they fit.

    A text unlike the calibration's brings other tokens, and some of them reach much further than all of the
    calibration. Where windows are left over, the last one is filled from the start.
    """
    tokens = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    count = min(-(-tokens // seq_len), most)
    return order.repeat(-(-count * seq_len // tokens))[: count * seq_len].view(count, seq_len)


def _read_back(work: Workspace, names: list[str], blocks: int) -> dict[str, LayerStats]:
    found: dict[str, LayerStats] = {}
    for number in range(blocks):
        tensors, document = load_file(work.piece(number)), work.document(number)
        stats = {
            name: LayerStats(**{field: tensors[f"{name}:{field}"] for field in STATS_FIELDS}, tokens=tokens)
            for name, tokens in document["tokens"].items()
        }
        found |= {name: stats[owner] for name, owner in document["aliases"].items()}
    return {name: found[name] for name in names}
