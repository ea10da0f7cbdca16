"""The operands of a bipolar product on a GPU, as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.cuda.parameters import Argument
from quantkit.formats.bipolar import LARGEST_BYTE, largest_value

CODED_LIMIT = 2 * (LARGEST_BYTE + 1)
"""What stands for the largest code of a weight with scale codes (kernels/bipolar/planes.cuh)."""


@dataclass(frozen=True)
class Activations:
    """Quantized activations of M tokens in tile order.

    tiles: [blocks, k tiles, planes, 64, 128] uint8. sums: [M] int32, sums of codes; with zero points [2, M], of which
    the second row is twice these. steps: [M] fp32.
    """

    tiles: Tensor
    sums: Tensor
    steps: Tensor


@dataclass(frozen=True)
class Weight:
    """A prepared weight. tiles: as of Activations. row_sums: [N] int32. scales: [N, 1] fp16.

    scale_tiles: [blocks, k tiles, 8, 64] uint8, a scale code per row and line of 128 columns (layout.tile_scales),
    which counts in the row's scale; or None. row_sums are then those of bytes: code times value, plus 128.
    """

    tiles: Tensor
    row_sums: Tensor
    scales: Tensor
    scale_tiles: Tensor | None = None

    @property
    def coded(self) -> bool:
        """Whether it has scale codes."""
        return self.scale_tiles is not None


@dataclass(frozen=True)
class Product:
    """Operands of y [M, N] = x W^T + bias, and y. in_features: K. bits: of the codes of x and W.

    zero: whether tokens have zero points. weights_ready: nothing queued on the GPU still writes the weight.
    """

    acts: Activations
    weight: Weight
    bias: Tensor | None
    y: Tensor
    in_features: int
    bits: tuple[int, int]
    zero: bool = False
    weights_ready: bool = False

    @property
    def planes(self) -> tuple[int, int]:
        """Of W and x in tile order."""
        return self.weight.tiles.shape[2], self.acts.tiles.shape[2]

    def tensors(self) -> dict[str, Tensor | None]:
        """What the kernels of all products take, by the names of their parameters."""
        acts = {"xTiles": self.acts.tiles, "xSums": self.acts.sums, "xSteps": self.acts.steps}
        weight = {"wTiles": self.weight.tiles, "wSums": self.weight.row_sums, "wScales": self.weight.scales}
        return {**acts, **weight, "bias": self.bias, "y": self.y}

    def tensors_of_planes(self) -> dict[str, Tensor | None]:
        """The same for the kernels that take planes of W."""
        return {**self.tensors(), "scaleTiles": self.weight.scale_tiles}

    def sizes(self) -> dict[str, Argument]:
        """M, N and K."""
        m, n = self.y.shape
        return {"M": m, "N": n, "K": self.in_features}

    def limits(self) -> dict[str, Argument]:
        """The largest codes, for the kernels that take any bits."""
        act_bits, weight_bits = self.bits
        weight_limit = CODED_LIMIT if self.weight.coded else largest_value(weight_bits)
        return {"actLimit": largest_value(act_bits), "weightLimit": weight_limit}
