"""The prepared order of a trellis weight: its planes, one below the other, as a bcq weight of one plane.

They are in the order for latency whatever they are prepared for: of one plane it is at most 12 % slower at 16 tokens
than that for batches, and nearly twice as fast at one (docs/results/trellis-rows-h100.json).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.formats.bcq import ROW_WISE, BcqTensors
from quantkit.formats.trellis import TrellisTensors
from quantkit.ops.bcq.layout import BcqTiles, tile, untile


@dataclass(frozen=True)
class TrellisTiles:
    """A prepared weight [N, K].

    planes: of [q N, K], their scales all ``unit``. scales [N, 1], filter [q, taps]: as stored.
    """

    planes: BcqTiles
    scales: Tensor
    filter: Tensor

    @property
    def unit(self) -> float:
        """What the plane product counts in: its sums of K terms then stay as small as x is, within fp16."""
        return plane_scale(self.planes.in_features)


def plane_scale(in_features: int) -> float:
    """The power of two that is nearest to 1 / sqrt(K)."""
    return 2.0 ** -round(math.log2(in_features) / 2)


def prepare_planes(stored: TrellisTensors, in_features: int) -> BcqTiles:
    """The planes [q, N, ceil(K/8)] as those of q N rows."""
    signs = stored.signs.flatten(0, 1)[None]
    scales = torch.full((1, signs.shape[1], 1), plane_scale(in_features), dtype=torch.float16, device=signs.device)
    return tile(BcqTensors(signs, scales), in_features, ROW_WISE)


def restore_planes(weight: TrellisTiles) -> TrellisTensors:
    """Inverse of prepare_planes."""
    signs = untile(weight.planes).signs[0].unflatten(0, (len(weight.filter), -1))
    return TrellisTensors(signs.contiguous(), weight.scales, weight.filter)
