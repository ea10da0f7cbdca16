"""The levels of binary-coded groups: sums of scales under every pattern of signs, and the nearest of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from quantkit.formats.planes import code_signs

_AT_ONCE = 1 << 17  # values whose ranks a core's cache holds


@dataclass(frozen=True)
class Coding:
    """Scales [q, G] and offset [G] of some groups, fp32; offset is 0 where none is stored."""

    scales: Tensor
    offset: Tensor

    def levels(self) -> Tensor:
        """[G, 2**q]: the value of every code."""
        return self.scales.t() @ sign_table(self.scales) + self.offset[:, None]

    @cached_property
    def by_size(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rising levels [G, 2**q], their codes, and the middles between them: once for all columns of a group."""
        levels, order = self.levels().sort(dim=-1)
        return levels, order, (levels[:, 1:] + levels[:, :-1]) / 2

    def nearest(self, values: Tensor) -> Nearest:
        """The nearest level to each of values [G, g]."""
        levels, order, middles = self.by_size
        if values.shape[1] == 1:  # compensation, column after column: two operations instead of six per bit
            return Nearest((values > middles).sum(dim=-1, keepdim=True), order, levels)
        rank = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
        rows = max(1, len(values) if values.is_cuda else _AT_ONCE // values.shape[1])
        for part in zip(values.split(rows), middles.split(rows), rank.split(rows), strict=True):
            _add_ranks(*part)
        return Nearest(rank, order, levels)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and levels, [G, g] each, nearest to values [G, g]."""
        nearest = self.nearest(values)
        return nearest.codes(), nearest.levels()

    def stored(self) -> Coding:
        """The coding after its trip through fp16, scales positive and descending (nuQmm: alpha in R+)."""
        scales = self.scales.abs().half().float().sort(dim=0, descending=True).values
        return Coding(scales, self.offset.half().float())

    def select(self, groups: Tensor) -> Coding:
        """The coding of some of the groups."""
        return Coding(self.scales[:, groups], self.offset[groups])


def _add_ranks(values: Tensor, middles: Tensor, rank: Tensor) -> None:
    """Add to zeros [G, g] how many of a group's rising middles [G, 2**q - 1] are less than each of values [G, g].

    By halving: a comparison and q - 1 gathers, at most a third of the time of torch.searchsorted on rows this short.
    """
    half = middles.shape[1] // 2
    rank.add_(values > middles[:, half : half + 1], alpha=half + 1)
    while half:
        half //= 2
        rank.add_(values > middles[:, half:].gather(-1, rank), alpha=half + 1)


@dataclass(frozen=True)
class Nearest:
    """Nearest levels of values [G, g]: rank [G, g] among the sorted levels [G, 2**q], whose codes are order."""

    rank: Tensor
    order: Tensor
    sorted_levels: Tensor

    def codes(self) -> Tensor:
        """[G, g] int64."""
        return self.order.gather(-1, self.rank)

    def levels(self) -> Tensor:
        """[G, g] fp32."""
        return self.sorted_levels.gather(-1, self.rank)

    def select(self, groups: Tensor) -> Nearest:
        """The same for some of the groups."""
        return Nearest(self.rank[groups], self.order[groups], self.sorted_levels[groups])

    def sum_by_code(self, values: Tensor) -> Tensor:
        """[G, 2**q] fp32: sum of values [G, g] over the weights that have each code."""
        by_rank = torch.zeros_like(self.sorted_levels).scatter_add_(-1, self.rank, values)
        return torch.zeros_like(by_rank).scatter_(-1, self.order, by_rank)


def sign_table(scales: Tensor) -> Tensor:
    """[q, 2**q] fp32 for scales [q, G], on their device: +1 where bit i of the code is set, else -1."""
    return _sign_table(scales.shape[0], scales.device)


@cache
def _sign_table(bits: int, device: torch.device) -> Tensor:
    """Made once: groups are fitted in hundreds of rounds, of which each asks for it."""
    return torch.stack(code_signs(torch.arange(2**bits, device=device), bits))
