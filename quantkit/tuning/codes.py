"""Binary codes while they are tuned: the nearest ones, the weight of codes, and its gradient.

Every step of tuning does all three for every weight, which took a CPU a third of its time. So a weight is worked on in
parts that a cache holds, and most codes are found without a table of levels. On a GPU each of the three is a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantkit.formats.planes import code_signs
from quantkit.ops.solve import codes as kernels
from quantkit.quantizers.bcq.levels import Coding

_AT_ONCE = 1 << 19  # weights whose fp32 values a shared cache holds several times


@dataclass(frozen=True)
class _Part:
    """Some rows of a weight [N, K] with groups along K, all of one width: slices of N, of the groups and of K."""

    rows: slice
    groups: slice
    columns: slice

    def grouped(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The part [n, G, g] of each of values [N, K]: views."""
        groups = self.groups.stop - self.groups.start
        return tuple(each[self.rows, self.columns].unflatten(-1, (groups, -1)) for each in values)

    def of_groups(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The part [..., n, G] of each of values [..., N, G]: views."""
        return tuple(each[..., self.rows, self.groups] for each in values)


def nearest_codes(latent: Tensor, scales: Tensor, offset: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(codes [N, K] uint8, their weight [N, K]) whose levels are nearest to the latent weights [N, K] fp32.

    scales: [q, N, G]. offset: [N, G]. width: g, of every group but the last, which may have fewer columns.
    """
    if latent.is_cuda:
        return kernels.nearest_codes(latent, scales, offset, width)
    codes, weight = torch.empty_like(latent, dtype=torch.uint8), torch.empty_like(latent)
    whole = list(_parts(latent, width, latent.numel()))
    for part in _parts(latent, width, _AT_ONCE):
        _plane_by_plane(part.grouped(latent, codes, weight), Coding(*part.of_groups(scales, offset)))
    others = [(part, mask) for part in whole if (mask := ~_nested(*part.of_groups(scales))).any()]
    if others:
        _mend(others, (latent, codes, weight), Coding(scales, offset), width)
    return codes, weight


def weight_of(codes: Tensor, scales: Tensor, offset: Tensor, width: int) -> Tensor:
    """[N, K] fp32 of codes [N, K]; the rest as nearest_codes takes it."""
    if codes.is_cuda:
        return kernels.weight_of(codes, scales, offset, width)
    weight = torch.empty_like(codes, dtype=scales.dtype)
    for part in _parts(codes, width, _AT_ONCE):
        _add_planes(part.grouped(codes, weight), Coding(*part.of_groups(scales, offset)))
    return weight


def gradients_of_groups(gradient: Tensor, codes: Tensor, bits: int, width: int) -> tuple[Tensor, Tensor]:
    """(of scales [q, N, G], of offset [N, G]) from the gradient [N, K] of the weight of codes [N, K]."""
    if codes.is_cuda:
        return kernels.gradients_of_groups(gradient, codes, bits, width)
    offset = gradient.new_empty(codes.shape[0], -(-codes.shape[1] // width))
    scales = gradient.new_empty(bits, *offset.shape)
    for part in _parts(codes, width, _AT_ONCE):
        (values, own), (scale_sums, total) = part.grouped(gradient, codes), part.of_groups(scales, offset)
        torch.sum(values, dim=-1, out=total)
        for i, sums in enumerate(scale_sums):
            of_set_bits = (own & (1 << i)).to(values.dtype).mul_(values).sum(dim=-1)
            torch.sub(of_set_bits.mul_(2.0 ** (1 - i)), total, out=sums)
    return scales, offset


def _parts(values: Tensor, width: int, at_once: int) -> Iterator[_Part]:
    """All of values [N, K], so many of them at a time."""
    rows, columns = values.shape
    whole = columns // width
    some_rows = max(1, at_once // max(1, columns))
    for first in range(0, rows, some_rows):
        some = slice(first, min(first + some_rows, rows))
        if whole:
            yield _Part(some, slice(0, whole), slice(0, whole * width))
        if columns % width:
            yield _Part(some, slice(whole, whole + 1), slice(whole * width, columns))


def _nested(scales: Tensor) -> Tensor:
    """[n, G]: whether no scale of [q, n, G] is less than the sum of those behind it. Then the sign of what is left,
    scale after scale, gives the nearest level."""
    behind = scales.flip(0).cumsum(dim=0).flip(0) - scales
    return (scales >= behind).all(dim=0)


def _plane_by_plane(values: Sequence[Tensor], coding: Coding) -> None:
    """Of latent weights, codes and weight [n, G, g] of groups with nested levels, write the last two.

    coding: here and below with scales [q, n, G] and offset [n, G].
    """
    latent, codes, weight = values
    offset = coding.offset[..., None]
    left = latent - offset
    weight.copy_(offset.expand_as(weight))
    codes.zero_()
    step = torch.empty_like(left)
    for i, scale in enumerate(coding.scales[..., None]):
        torch.copysign(scale.expand_as(left), left, out=step)
        weight.add_(step)
        left.sub_(step)
        codes.add_((step > 0).view(torch.uint8), alpha=1 << i)


def _mend(others: Sequence[tuple[_Part, Tensor]], values: Sequence[Tensor], coding: Coding, width: int) -> None:
    """Write codes and weight of the groups that a mask [n, G] of each part tells, all at once. values: [N, K] each."""
    picked = [[each[mask] for each in part.grouped(*values)] for part, mask in others]
    filled = [[pad(each, (0, width - each.shape[-1])) for each in some] for some in picked]
    own = [[each[..., mask] for each in part.of_groups(coding.scales, coding.offset)] for part, mask in others]
    scales, offset = (torch.cat(each, dim=-1) for each in zip(*own, strict=True))
    together = [torch.cat(each)[:, None] for each in zip(*filled, strict=True)]
    _by_table(together, Coding(scales[..., None], offset[:, None]))
    sizes = [len(some[0]) for some in picked]
    for place in (1, 2):
        for (part, mask), chosen in zip(others, together[place][:, 0].split(sizes), strict=True):
            (target,) = part.grouped(values[place])
            target[mask] = chosen[:, : target.shape[-1]]


def _by_table(values: Sequence[Tensor], coding: Coding) -> None:
    """The same of any groups."""
    latent, codes, _ = values
    levels = Coding(coding.scales.flatten(1), coding.offset.flatten())
    codes.copy_(levels.nearest(latent.flatten(0, 1)).codes().view_as(codes))
    _add_planes(values[1:], coding)


def _add_planes(values: Sequence[Tensor], coding: Coding) -> None:
    """Of codes and weight [n, G, g], write the weight."""
    codes, weight = values
    weight.copy_(coding.offset[..., None].expand_as(weight))
    for scale, signs in zip(coding.scales[..., None], code_signs(codes, len(coding.scales)), strict=True):
        weight.addcmul_(signs, scale)
