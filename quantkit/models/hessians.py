"""E[x x^T] of what flows into the Linears of a block."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
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


def block_hessians(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    linears: Mapping[str, nn.Module],
    features: Mapping[str, Features] | None = None,
    experts: Container[str] = (),
    *,
    ranks: Ranks = ALONE,
) -> dict[str, Tensor]:
    """E[x x^T] [K, K] fp32, over all tokens of all windows, of each given Linear of block ``index``.

    features: by name of Linear, a function of x to take the matrix of instead: E[f(x) f(x)^T] [C, C].
    experts: names of Linears of experts. Theirs is over the tokens routed to them, each counted by the square of its
        routing weight, as an error there counts in what the block gives; where the tokens are few, it is nearer to
        the matrix of equal and independent channels (``tempered``), which it is where there are none.
    ranks: each gives the matrices that it took the inputs of; together they give all.
    Linears that share an input share one tensor, unless they have features. Memory: one matrix per distinct input.
    Raises ModelError for a Linear that the block never calls, unless it is an expert's.
    """
    sums: dict[str, Tensor] = {}
    tokens: dict[str, int] = {}
    masses: dict[str, float] = {}
    own = features or {}

    def accumulate(name: str, x: Tensor) -> None:
        x, weights = _split(x, linears[name])
        x, mass = own[name](x).float() if name in own else x.float(), float(x.shape[0])
        if weights is not None:
            x, mass = x * weights[:, None], float(weights.double().square().sum())
        masses[name] = masses.get(name, 0.0) + mass
        total = sums.get(name)
        sums[name] = x.t() @ x if total is None else total.addmm_(x.t(), x)
        tokens[name] = tokens.get(name, 0) + x.shape[0]

    groups = [{name: linears[name]} for name in own]
    groups.append({name: module for name, module in linears.items() if name not in own})
    taps = [(group, accumulate) for group in groups]
    with routing_weights(block) as weights_of:
        watched = Watched(ranks, partial(_join, linears, weights_of))
        watch_block(block, inputs, index, taps, watched=watched)
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
                sums[name], tokens[name] = none.new_zeros(width, width), 0
    for name, total in sums.items():
        total.div_(masses.get(name) or 1.0)
        if name in experts:
            _temper(total, tokens[name])
    return {name: sums[owner] for name, owner in mine.items()}


def _join(
    linears: Mapping[str, nn.Module], weights_of: Callable[[nn.Module], Tensor | None], name: str, x: Tensor
) -> Tensor:
    """x [tokens, K], with the routing weights as one more column where there are any."""
    weights = weights_of(linears[name])
    return x if weights is None else torch.cat((x, weights.to(x.dtype)[:, None]), dim=1)


def _split(x: Tensor, linear: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(x [tokens, K], routing weights [tokens] fp32 or None) of what _join gave."""
    _, k = linear_shape(linear)
    return x[:, :k], x[:, k].float() if x.shape[1] > k else None


def _temper(hessian: Tensor, tokens: int) -> None:
    """Move E[x x^T] over so many tokens, in place, towards that of independent channels of equal size."""
    equal = hessian.diagonal().mean().item() if tokens else 1.0
    hessian.mul_(trust(tokens))
    hessian.diagonal().add_(equal * (1 - trust(tokens)))
