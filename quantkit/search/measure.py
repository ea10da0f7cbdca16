"""Measured KL of the whole model with one layer quantized, to correct what the sensitivity predicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.calibration.artifact import Calibration
from quantkit.evaluation.divergence import score_logits
from quantkit.formats.table import dequantize
from quantkit.models.families import block_linears, linear_weight
from quantkit.progress import track
from quantkit.search.table import ErrorTable, LayerMethod, Option, TableFile, layers_with_hessians

# The reference's logits stay in memory for all layers: 0.5 GB at a vocabulary of 128,000.
_TOKENS = 1024


def measure_layers(
    model: Any,
    calibration: Calibration,
    table: ErrorTable,
    options: Sequence[Option],
    count: int,
    *,
    method: LayerMethod,
    cache: TableFile,
) -> None:
    """Measure the ``count`` layers of largest estimate (all, if negative), each at one option per bit width.

    The option is the middle group size. Results go to the cache; the model is left as it was.
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
    if not todo:
        return
    linears = block_linears(model)
    windows = calibration.windows[: max(1, _TOKENS // calibration.windows.shape[1])]
    reference = [_logits(model, window) for window in windows]
    work = layers_with_hessians(model, calibration, todo)
    for layer, option in track(work, "measuring layers", total=sum(len(fresh) for fresh in todo.values())):
        packed = method.quantize(layer, option)
        kl = _kl_with(model, linears[layer.name], dequantize(packed), windows, reference)
        cache.add("measured", layer.name, option, kl=kl)


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


@torch.no_grad()
def _kl_with(model: Any, module: nn.Module, weight: Tensor, windows: Tensor, reference: Sequence[Tensor]) -> float:
    """Mean KL over the windows' tokens while the module has this weight [N, K]."""
    place = linear_weight(module).data
    original = place.clone()
    place.copy_(weight)
    try:
        parts = [
            score_logits(before, _logits(model, window), window[1:].long()).kl
            for window, before in zip(windows, reference, strict=True)
        ]
    finally:
        place.copy_(original)
    return float(torch.cat(parts).mean())


@torch.no_grad()
def _logits(model: Any, window: Tensor) -> Tensor:
    device = next(model.parameters()).device
    logits: Tensor = model(window[None].to(device, torch.long), use_cache=False).logits[0, :-1]
    return logits
