"""E[x x^T] of what flows into the Linears of a block."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.models.experts import routing_weights
from quantkit.models.families import linear_shape, linear_weight
from quantkit.models.streaming import BlockInputs
from quantkit.models.watching import Watched, watch_block
from quantkit.ranks import ALONE, Ranks
from quantkit.stats import trust

Features = Callable[[Tensor], Tensor]
"""x [tokens, K] of a Linear -> [tokens, C], what its quantizer calibrates on instead."""


@dataclass(frozen=True)
class Weighing:
    """What the matrices are of, besides x x^T of every token alike.

    features: by name of Linear, a function of x to take the matrix of instead: E[f(x) f(x)^T] [C, C].
    experts: names of Linears of experts. Theirs is over the tokens routed to them, each counted by the square of its
        routing weight, as an error there counts in what the block gives; where the tokens are few, it is nearer to
        the matrix of equal and independent channels (``tempered``), which it is where there are none.
    saliency: by name of Linear, no expert's, weights [windows, seq_len, G] of the tokens, not negative: a matrix for
        each column of weights, E[w x x^T] / E[w], [G, K, K].
    """

    features: Mapping[str, Features] = field(default_factory=dict)
    experts: Container[str] = ()
    saliency: Mapping[str, Tensor] = field(default_factory=dict)


def block_hessians(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    linears: Mapping[str, nn.Module],
    weighing: Weighing = Weighing(),
    *,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """E[x x^T] [K, K] fp32, over all tokens of all windows, of each given Linear of block ``index``.

    ranks: each gives the matrices that it took the inputs of; together they give all.
    Linears that share an input share one tensor, unless they have features or saliency. Memory: one matrix per distinct
    input, G for one with saliency.
    Raises ModelError for a Linear that the block never calls, unless it is an expert's.
    """
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    masses: dict[str, Tensor] = {}
    own, experts = weighing.features, weighing.experts

    def accumulate(name: str, x: Tensor) -> None:
        x, weights = _split(x, linears[name])
        x = own[name](x).float() if name in own else x.float()
        mass = weights.double().square().sum(dim=0).cpu() if weights.numel() else torch.tensor([float(x.shape[0])])
        masses[name] = masses.get(name, 0.0) + mass
        tokens[name] = tokens.get(name, 0) + x.shape[0]
        if name not in sums:
            sums[name] = x.new_zeros(len(mass), x.shape[1], x.shape[1])
        for number, total in enumerate(sums[name]):
            weighted = x * weights[:, number, None] if weights.numel() else x
            total.addmm_(weighted.t(), weighted)

    alone = [name for name in linears if name in own or name in weighing.saliency]
    groups = [{name: linears[name]} for name in alone]
    groups.append({name: module for name, module in linears.items() if name not in alone})
    taps = [(group, accumulate) for group in groups]
    with routing_weights(block) as weights_of:
        watched = Watched(ranks, partial(_join, linears, weights_of, weighing.saliency))
        watch_block(block, inputs, index, taps, watched=watched, batches=True)
    mine: dict[str, str] = {}
    for name, module in linears.items():
        known = name in watched.aliases
        if not known and name not in experts:
            raise ModelError(f"{name}: its block never calls it, so there is nothing to calibrate on")
        if watched.owner(name, module) == ranks.number:
            mine[name] = watched.aliases[name]
            if not known:
                none = linear_weight(module)[:0].float()
                width = own[name](none).shape[1] if name in own else none.shape[1]
                sums[name], tokens[name], masses[name] = none.new_zeros(1, width, width), 0, torch.zeros(1)
    for name, total in sums.items():
        total.div_(torch.where(masses[name] > 0, masses[name], 1.0).to(total)[:, None, None])
        if name in experts:
            _temper(total[0], tokens[name])
        if name not in weighing.saliency:
            sums[name] = total[0]
    return {name: sums[owner] for name, owner in mine.items()}


def _join(
    linears: Mapping[str, nn.Module],
    weights_of: Callable[[nn.Module], Tensor | None],
    saliency: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    windows: Sequence[int],
) -> Tensor:
    """x [tokens, K], with what its tokens are scaled by as further columns, where there is any: routing weights, or the
    roots of saliency."""
    if name in saliency:
        roots = saliency[name][list(windows)].flatten(0, 1).to(x.device, torch.float32).sqrt()
        return torch.cat((x, roots.to(x.dtype)), dim=1)
    weights = weights_of(linears[name])
    return x if weights is None else torch.cat((x, weights.to(x.dtype)[:, None]), dim=1)


def _split(x: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor]:
    """(x [tokens, K], what its tokens are scaled by [tokens, G] fp32, G = 0 for none) of what _join gave."""
    _, k = linear_shape(linear)
    return x[:, :k], x[:, k:].float()


def _temper(hessian: Tensor, tokens: int) -> None:
    """Move E[x x^T] over so many tokens, in place, towards that of independent channels of equal size."""
    equal = hessian.diagonal().mean().item() if tokens else 1.0
    hessian.mul_(trust(tokens))
    hessian.diagonal().add_(equal * (1 - trust(tokens)))
