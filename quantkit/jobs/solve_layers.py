"""Quantizing the Linears of one block: one by one, or on a GPU several as one weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from quantkit.formats.base import PackedWeight
from quantkit.formats.shard import join
from quantkit.formats.table import dequantize
from quantkit.methods import METHODS, LayerPlan
from quantkit.quantizers.base import LayerInput, error_report

_MOST_WEIGHTS = 1 << 28  # of layers that are solved as one: 1 GB in fp32


def quantize_layers(plans: Mapping[str, LayerPlan], layers: dict[str, LayerInput]) -> dict[str, PackedWeight]:
    """Every layer, quantized by its plan; ``layers`` is emptied on the way.

    On a GPU, which small steps leave idle, layers of one width whose rows are independent are solved as one weight:
    those that share a Hessian (q, k, v; gate, up), and those that nothing was calibrated for (experts).
    """
    solved = {}
    for names in list(_together(plans, layers)):
        own, plan = [layers.pop(name) for name in names], plans[names[0]]
        if len(own) == 1:
            solved[names[0]] = solve_layer(own[0], plan)
            continue
        joined = replace(own[0], weight=torch.cat([layer.weight for layer in own]))
        packed = solve_layer(joined, plan)
        del joined
        solved |= dict(zip(names, split_rows(packed, own), strict=True))
    return solved


def solve_layer(layer: LayerInput, plan: LayerPlan) -> PackedWeight:
    """One layer, quantized by its plan; where parts of its rows have Hessians of their own, part by part."""
    quantize, parts = METHODS[plan.method].quantize, layer.row_parts()
    if len(parts) == 1:
        return quantize(parts[0], plan.settings)
    packed = [quantize(part, plan.settings) for part in parts]
    tensors = join(packed[0].spec, [part.tensors for part in packed], layer.weight.shape[1])
    assert tensors is not None  # rows of such methods share nothing
    whole = PackedWeight(packed[0].spec, (layer.weight.shape[0], layer.weight.shape[1]), tensors, {})
    return replace(whole, report=error_report(layer, dequantize(whole)))


def split_rows(packed: PackedWeight, layers: list[LayerInput]) -> Iterator[PackedWeight]:
    """The part of each layer in what their rows, one below the other, were packed as."""
    rows = [layer.weight.shape[0] for layer in layers]
    parts = {name: tensor.split(rows, dim=-2) for name, tensor in packed.tensors.items()}
    for number, layer in enumerate(layers):
        tensors = {name: part[number].contiguous() for name, part in parts.items()}
        shape = (rows[number], packed.shape[1])
        alone = PackedWeight(packed.spec, shape, tensors, {})
        yield replace(alone, report=error_report(layer, dequantize(alone)))


def _together(plans: Mapping[str, LayerPlan], layers: Mapping[str, LayerInput]) -> Iterator[list[str]]:
    """The names of layers that are solved as one, which have one plan."""
    groups: dict[object, list[str]] = {}
    for name, layer in layers.items():
        joins = layer.weight.is_cuda and METHODS[plans[name].method].independent_rows
        if not joins or (layer.hessian is None and layer.stats is not None):
            yield [name]
        else:
            key = (plans[name].method, repr(plans[name].settings), layer.weight.shape[1], id(layer.hessian))
            groups.setdefault(key, []).append(name)
    for names in groups.values():
        taken: list[str] = []
        weights = 0
        for name in names:
            count = layers[name].weight.numel()
            if taken and weights + count > _MOST_WEIGHTS:
                yield taken
                taken, weights = [], 0
            taken.append(name)
            weights += count
        yield taken
