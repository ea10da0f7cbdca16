"""Cutting weight rows into groups of columns, and the importance of each column inside a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.bcq import group_width

# Groups solved at once: 2^19 weights (2 MiB in fp32) stay in a core's cache, which halves the time.
_CHUNK_WEIGHTS = 1 << 19
_GPU_CHUNK_WEIGHTS = 1 << 23  # fewer and longer steps
# A channel never seen by the calibration text keeps this share of its group's largest importance, so that every
# group's least-squares problem stays defined.
_IMPORTANCE_FLOOR = 1e-6
# The smallest positive fp16 number: a scale below it would be stored as 0.
SMALLEST_SCALE = 2.0**-24


@dataclass(frozen=True)
class Span:
    """Where a batch of groups stands in its weight: some rows, and equally wide groups of columns in them."""

    rows: slice
    columns: slice
    groups: slice

    def put(self, target: Tensor, values: Tensor) -> None:
        """Write per-weight values [R * G, g] into target [N, K]."""
        block = target[self.rows, self.columns]
        block.copy_(values.reshape(block.shape))

    def put_groups(self, target: Tensor, values: Tensor) -> None:
        """Write per-group values [..., R * G] into target [..., N, groups of a row]."""
        block = target[..., self.rows, self.groups]
        block.copy_(values.reshape(block.shape))

    def groups_of(self, source: Tensor) -> Tensor:
        """Per-group values [..., N, groups of a row] -> those of this batch [..., R * G]."""
        return source[..., self.rows, self.groups].flatten(-2)


def weighted_error(levels: Tensor, values: Tensor, importance: Tensor) -> Tensor:
    """Sum of importance * (levels - values)^2 per group: [G, g] each -> [G]."""
    return (levels - values).square_().mul_(importance).sum(dim=-1)


def group_batches(weight: Tensor, importance: Tensor, group_size: int) -> Iterator[tuple[Span, Tensor, Tensor]]:
    """Cut [N, K] into batches of equally wide groups.

    Yields (span, values [R * G, g] fp32, importance [R * G, g] with a maximum of 1 per group). The shorter last
    group of every row comes in batches of its own.
    """
    rows, columns = weight.shape
    width = group_width(group_size, columns)
    whole = columns // width
    spans = [(0, whole, width)] if whole else []
    if columns % width:
        spans.append((whole, 1, columns % width))
    for first, count, span in spans:
        start = first * width
        block = weight[:, start : start + count * span].reshape(rows, count, span)
        weights = _floored(importance[start : start + count * span].reshape(count, span))
        step = max(1, (_GPU_CHUNK_WEIGHTS if weight.is_cuda else _CHUNK_WEIGHTS) // (count * span))
        for row in range(0, rows, step):
            values = block[row : row + step]
            yield (
                Span(
                    slice(row, row + values.shape[0]), slice(start, start + count * span), slice(first, first + count)
                ),
                values.reshape(-1, span).float(),
                weights.expand(values.shape[0], count, span).reshape(-1, span),
            )


def _floored(importance: Tensor) -> Tensor:
    """Scale each group's importance to a maximum of 1 and lift zeros, keeping ratios."""
    peak = importance.amax(dim=-1, keepdim=True)
    scaled = torch.where(peak > 0, importance / peak.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    return scaled.clamp_min(_IMPORTANCE_FLOOR)
