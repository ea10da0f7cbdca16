"""What the kernels of a Linear are given."""

from __future__ import annotations

from torch import Tensor

from quantkit.formats.bcq import BcqSpec
from quantkit.formats.flatten import FlattenSpec
from quantkit.formats.trellis import TrellisSpec
from quantkit.ops.rotation.op import rotate_inputs


def kernel_input(spec: BcqSpec | FlattenSpec | TrellisSpec, x: Tensor) -> Tensor:
    """x [..., K], rotated where the stored weight is of rotated inputs."""
    return rotate_inputs(x) if spec.rotate_inputs else x
