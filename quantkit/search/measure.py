"""Measured KL of the whole model with one layer quantized, to correct what the sensitivity predicts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.calibration.artifact import Calibration
from quantkit.evaluation.divergence import score_logits
from quantkit.formats.table import dequantize
from quantkit.models.families import block_linears, linear_weight
from quantkit.models.logits import logits_of, window_logits
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, advance, capture_inputs
from quantkit.progress import track
from quantkit.search.table import ErrorTable, LayerMethod, Option, TableFile, blocks_with_hessians
from quantkit.storage.resume import Workspace, passing_workspace

# The reference's logits stay in memory for all layers: 0.5 GB at a vocabulary of 128,000.
_TOKENS = 1024
# Hidden states of variants, in a file: where they take more, those at hand are finished before others begin.
_VARIANT_BYTES = 4 * 10**9


def measure_layers(
    stream: ModelStream,
    calibration: Calibration,
    table: ErrorTable,
    options: Sequence[Option],
    count: int,
    *,
    method: LayerMethod,
    cache: TableFile,
) -> None:
    """Measure the ``count`` layers of largest estimate (all, if negative), each at one option per bit width.

    The option is the middle group size. Results go to the cache; the model is left as it was. One block is in memory at
    a time: the hidden states of every variant of the model flow through the blocks behind its layer.
    """
    anchors = anchor_options(options)
    ranked = sorted(table.shapes, key=lambda name: -table.get(name, anchors[0]).estimate)
    chosen = ranked if count < 0 else ranked[:count]
    todo: dict[str, list[Option]] = {}
    for name in chosen:
        fitted = [option.fitted(table.shapes[name]) for option in anchors]
        fresh = [option for option in fitted if ("measured", name, option) not in cache.rows]
        if fresh:
            todo[name] = fresh
    if todo:
        _measure(stream, calibration, todo, method, cache)


def _measure(
    stream: ModelStream,
    calibration: Calibration,
    todo: Mapping[str, Sequence[Option]],
    method: LayerMethod,
    cache: TableFile,
) -> None:
    windows = calibration.windows[: max(1, _TOKENS // calibration.windows.shape[1])]
    logits = [each.cpu() for each in window_logits(stream, list(windows), "reference")]
    linears, total = block_linears(stream.model), sum(map(len, todo.values()))
    with passing_workspace({}) as work:
        reference = capture_inputs(stream, windows, room=partial(work.state, 0))
        variants = _Variants(stream, windows, logits, work, cache)
        for index, block, layers in track(
            blocks_with_hessians(stream, calibration, todo), f"measuring {total} layers under options, by block"
        ):
            variants.advance(index, block)
            for layer, option in ((each, option) for each in layers for option in todo[each.name]):
                weight = dequantize(method.quantize(layer, option))
                with _replaced(linears[layer.name], weight):
                    variants.add(layer.name, option, index, block, reference)
            reference = advance(block, reference, index)
            if variants.bytes > _VARIANT_BYTES:
                variants.finish(index + 1)
        variants.finish(index + 1)


class _Variants:
    """Models that differ from the reference in one layer, as the hidden states that flow through their blocks.

    windows: [n, seq_len], those measured on. logits: the reference's for each. Results go to the cache.
    """

    def __init__(
        self, stream: ModelStream, windows: Tensor, logits: Sequence[Tensor], work: Workspace, cache: TableFile
    ):
        self._stream, self._windows, self._logits, self._work, self._cache = stream, windows, logits, work, cache
        self._flowing: dict[tuple[str, Option], BlockInputs] = {}

    @property
    def bytes(self) -> int:
        """What the hidden states take."""
        return sum(inputs.hidden.numel() * inputs.hidden.itemsize for inputs in self._flowing.values())

    def add(self, name: str, option: Option, index: int, block: nn.Module, reference: BlockInputs) -> None:
        """The model whose block ``index`` is this one, all before it being the reference's."""
        number = len(self._flowing) + 1
        room = self._work.state(number, tuple(reference.hidden.shape), reference.hidden.dtype)
        self._flowing[name, option] = advance(block, reference, index, room)

    def advance(self, index: int, block: nn.Module) -> None:
        """Run all of them through a block that is the reference's in each."""
        for inputs in self._flowing.values():
            advance(block, inputs, index)

    def finish(self, index: int) -> None:
        """Run all of them through block ``index`` and those behind it; measure and drop them."""
        for later in range(index, len(self._stream.blocks)):
            with self._stream.block(later) as block:
                self.advance(later, block)
        with self._stream.outside(), torch.no_grad():
            for (name, option), inputs in self._flowing.items():
                parts = []
                for window, hidden, logits in zip(self._windows, inputs.hidden, self._logits, strict=True):
                    own = hidden[None].to(self._stream.device, inputs.dtype)
                    found = logits_of(self._stream, inputs, own, window)[:-1]
                    parts.append(score_logits(logits[:-1].to(found.device), found, window[1:].long()).kl)
                self._cache.add("measured", name, option, kl=float(torch.cat(parts).mean()))
        for number in range(1, len(self._flowing) + 1):
            self._work.discard(number)
        self._flowing.clear()


def anchor_options(options: Sequence[Option]) -> list[Option]:
    """Per bit width, rising, the option of the middle group size; the whole row counts as the widest."""
    widths = sorted({option.group_size for option in options}, key=lambda size: (size < 0, size))
    middle = widths[len(widths) // 2]
    return [Option(bits, middle) for bits in sorted({option.weight_bits for option in options})]


def corrected_losses(table: ErrorTable, options: Sequence[Option]) -> dict[tuple[str, Option], float]:
    """The KL expected of every entry: its estimate times measured / estimated at its layer's and bit width's anchor.

    Layers that were not measured take the median factor of those that were; without any the estimate stands.
    """
    factors: dict[tuple[str, int], float] = {}
    typical: dict[int, float] = {}
    for anchor in anchor_options(options):
        own = {}
        for name in table.shapes:
            entry = table.get(name, anchor)
            if entry.measured is not None and entry.estimate > 0:
                own[name] = entry.measured / entry.estimate
        typical[anchor.weight_bits] = statistics.median(own.values()) if own else 1.0
        factors |= {(name, anchor.weight_bits): factor for name, factor in own.items()}
    return {
        (name, option): entry.estimate * factors.get((name, option.weight_bits), typical[option.weight_bits])
        for (name, option), entry in table.entries.items()
    }


@contextmanager
def _replaced(module: nn.Module, weight: Tensor) -> Iterator[None]:
    """While entered, the module has this weight [N, K]."""
    place = linear_weight(module).data
    original = place.clone()
    place.copy_(weight)
    try:
        yield
    finally:
        place.copy_(original)
