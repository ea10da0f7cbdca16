"""The operands of a bipolar product on a GPU, as its kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quantkit.cuda.parameters import Argument
from quantkit.formats.bipolar import largest_value


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
    """A prepared weight. tiles: as of Activations. row_sums: [N] int32. scales: [N, 1] fp16."""

    tiles: Tensor
    row_sums: Tensor
    scales: Tensor

    def tensors(self) -> dict[str, Tensor | None]:
        """What the kernels of all products take of it, by the names of their parameters."""
        return {"wTiles": self.tiles, "wSums": self.row_sums, "wScales": self.scales}


@dataclass(frozen=True)
class GroupedWeight:
    """A prepared weight with scales by group. tiles: planes, as of Activations.

    scale_tiles: [blocks, k tiles, 8, 64] fp16, a scale per row and line of 128 columns (layout.tile_scales). offsets:
    [N] fp32, the sum of each row of the weight.
    """

    tiles: Tensor
    scale_tiles: Tensor
    offsets: Tensor

    def tensors(self) -> dict[str, Tensor | None]:
        """What the kernels of groups take of it, by the names of their parameters."""
        return {"wTiles": self.tiles, "scaleTiles": self.scale_tiles, "offsets": self.offsets}


@dataclass(frozen=True)
class Product:
    """Operands of y [M, N] = x W^T + bias, and y. in_features: K. bits: of the codes of x and W.

    zero: whether tokens have zero points. weights_ready: nothing queued on the GPU still writes the weight.
    """

    acts: Activations
    weight: Weight | GroupedWeight
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

    @property
    def grouped(self) -> bool:
        """Whether the weight has scales by group."""
        return isinstance(self.weight, GroupedWeight)

    def tensors(self) -> dict[str, Tensor | None]:
        """What the kernels take, by the names of their parameters."""
        acts = {"xTiles": self.acts.tiles, "xSums": self.acts.sums, "xSteps": self.acts.steps}
        return {**acts, **self.weight.tensors(), "bias": self.bias, "y": self.y}

    def args(self) -> dict[str, Argument]:
        """The same and sizes."""
        m, n = self.y.shape
        return {**self.tensors(), "M": m, "N": n, "K": self.in_features}

    def limits(self) -> dict[str, Argument]:
        """The largest codes, for the kernels that take any bits; those of groups know that of W."""
        act_bits, weight_bits = self.bits
        of_weight: dict[str, Argument] = {} if self.grouped else {"weightLimit": largest_value(weight_bits)}
        return {"actLimit": largest_value(act_bits), **of_weight}
