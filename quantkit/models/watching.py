"""What flows into the Linears of a block as windows run through it, on one rank or several.

With several, each runs its own windows, and every distinct input has one rank that takes it in: all windows of it, in
their order, whoever ran them. So sums are the same to the bit however many ranks there are, but for one rank on a GPU,
which may take in several windows at once. The cost is that inputs travel between the ranks: per window and block what
its Linears read, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.models.families import linear_shape
from quantkit.models.inputs import InputTap
from quantkit.models.streaming import BlockInputs, run_batches, run_block
from quantkit.ranks import ALONE, Loads, Ranks

Consume = Callable[[str, Tensor], None]
"""(name of a Linear, x [tokens, K]): takes in what flows into it."""
Prepare = Callable[[str, Tensor, Sequence[int]], Tensor]
"""(name of a Linear, x, numbers of the windows) -> what is taken in instead, made while the Linear is being run and
where it is."""
Taps = Sequence[tuple[Mapping[str, nn.Module], Consume]]
"""Linears by name, and what takes in their inputs; those of one entry that share an input are taken in once."""


def _as_it_is(_name: str, x: Tensor, _windows: Sequence[int]) -> Tensor:
    return x


@dataclass
class Watched:
    """What is known of a block's inputs, from one pass over windows to the next.

    ranks: those that share the windows. prepare: what is done to an input before it is taken in.
    aliases: every Linear that ran -> the name its input was taken in under. owners: such a name -> its rank.
    """

    ranks: Ranks = ALONE
    prepare: Prepare = _as_it_is
    aliases: dict[str, str] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    loads: Loads = field(init=False)

    def __post_init__(self) -> None:
        self.loads = Loads(self.ranks)

    def owner(self, name: str, linear: nn.Module) -> int:
        """The rank that works on a Linear: the one that took its input in; for one that never ran, any."""
        found = self.aliases.setdefault(name, name)
        if found not in self.owners:
            self.owners |= self.loads.assign({found: float(linear_shape(linear)[1])})
        return self.owners[found]


def watch_block(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    taps: Taps,
    *,
    into: Tensor | None = None,
    windows: range | None = None,
    watched: Watched | None = None,
    batches: bool = False,
) -> Watched:
    """Run this rank's windows through the block, its outputs going to ``into``; inputs are taken in as Watched says.

    windows: the numbers of those that run, by default all. watched: of an earlier pass, which this one adds to.
    batches: whether the inputs of several windows may be taken in at once, x [windows * tokens, K].
    """
    watched = watched or Watched()
    windows = range(len(inputs.hidden)) if windows is None else windows
    if watched.ranks.count > 1:
        return _watch_together(block, inputs, index, taps, into, windows, watched)
    running: list[int] = []

    def taking_in(consume: Consume) -> Consume:
        return lambda name, x: consume(name, watched.prepare(name, x, running))

    def runs_next(numbers: Sequence[int]) -> None:
        running[:] = numbers

    with ExitStack() as stack:
        entered = [stack.enter_context(InputTap(linears, taking_in(consume))) for linears, consume in taps]
        flowing = inputs if batches else replace(inputs, batched={})
        for numbers, output in run_batches(block, flowing, index, windows, before=runs_next):
            if into is not None:
                into[numbers] = output.to(into.device, into.dtype)
    for tap in entered:
        watched.aliases = tap.aliases | watched.aliases
    watched.owners = dict.fromkeys(watched.aliases.values(), 0)
    return watched


def _watch_together(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    taps: Taps,
    into: Tensor | None,
    windows: range,
    watched: Watched,
) -> Watched:
    linears = {name: module for group, _ in taps for name, module in group.items()}
    consumers = {name: consume for group, consume in taps for name in group}
    ranks = watched.ranks
    for first in range(windows.start - windows.start % ranks.count, windows.stop, ranks.count):
        own = [number for number in (first + ranks.number,) if number in windows]
        kept, aliases = _run_own(block, inputs, index, taps, into, own, watched.prepare)
        steps = ranks.collect((aliases, {name: tuple(x.shape) for name, x in kept.items()}))
        _take_aliases(watched, [found for found, _ in steps], linears)
        for sent in _exchange(kept, [shapes for _, shapes in steps], inputs.dtype, block, ranks):
            for name, x in sent.items():
                if watched.owners[name] == ranks.number:
                    consumers[name](name, x)
    return watched


def _run_own(
    block: nn.Module,
    inputs: BlockInputs,
    index: int,
    taps: Taps,
    into: Tensor | None,
    windows: Sequence[int],
    prepare: Prepare,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(what flowed into the Linears, Watched.aliases) of one window, or of none."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        kept[name] = prepare(name, x, windows).clone()  # what the block does with it afterwards must not be seen

    with ExitStack() as stack:
        entered = [stack.enter_context(InputTap(group, keep)) for group, _ in taps]
        for number, output in run_block(block, inputs, index, windows):
            if into is not None:
                into[number] = output[0].to(into.device)
    return kept, {name: owner for tap in entered for name, owner in tap.aliases.items()}


def _take_aliases(watched: Watched, found: Sequence[Mapping[str, str]], linears: Mapping[str, nn.Module]) -> None:
    """Take in what the ranks saw share an input, and choose who takes in the inputs that are new."""
    for aliases in found:
        for name, owner in aliases.items():
            if watched.aliases.setdefault(name, owner) != owner:
                raise ModelError(f"{name}: shares its input with {owner} in some windows only; not supported")
    shared = list(watched.aliases.values())
    fresh = [name for name in linears if name in shared and name not in watched.owners]
    watched.owners |= watched.loads.assign({n: float(linear_shape(linears[n])[1] * shared.count(n)) for n in fresh})


def _exchange(
    kept: Mapping[str, Tensor],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    dtype: torch.dtype,
    block: nn.Module,
    ranks: Ranks,
) -> list[dict[str, Tensor]]:
    """What every rank kept, by name, in order of ranks; shapes: of each rank's."""
    size = max(sum(map(prod, own.values())) for own in shapes)
    sent = torch.zeros(size, dtype=dtype, device=next(block.parameters()).device)
    flat: list[Any] = [x.to(dtype).flatten() for x in kept.values()]
    if flat:
        torch.cat(flat, out=sent[: sum(map(len, flat))])
    found = []
    for values, own in zip(ranks.gather(sent), shapes, strict=True):
        parts = values[: sum(map(prod, own.values()))].split([prod(shape) for shape in own.values()])
        found.append({name: part.view(shape) for (name, shape), part in zip(own.items(), parts, strict=True)})
    return found
