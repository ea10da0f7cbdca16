"""Linears that read one input (q, k, v; gate, up) as one product where the model's own code runs, as for prompts.

The first of them multiplies for all, and the others take what is theirs when they are handed the same tensor. A prompt
costs the host as many kernel launches fewer, and small weights (k, v) are no products of their own on the GPU.
Each Linear still runs, is saved and moves by itself; one that is called with another tensor, or whose own tensors were
replaced, multiplies alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.models.families import known_family, merged_linears
from quantkit.models.structure import submodule
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.runtime.merged_linears import Product, merge_linears
from quantkit.runtime.twin import is_watched


class SharedProduct:
    """The common product of some Linears, and of the last input the outputs that were not taken yet."""

    def __init__(self, product: Product, out_features: Sequence[int]):
        self._product, self._out_features = product, list(out_features)
        self._held: tuple[Tensor, int, list[Tensor | None]] | None = None

    def output(self, index: int, x: Tensor) -> Tensor | None:
        """The output [..., N] of the Linear of that number for x [..., K].

        None for any but the first where x is not what the first one has multiplied, or has changed since.
        """
        held = self._held  # read once: other threads may run the same model
        if index == 0:
            outputs: list[Tensor | None] = list(self._product(x).split(self._out_features, dim=-1))
            held = self._held = x, x._version, outputs
        if held is None or held[0] is not x or held[1] != x._version:
            return None
        outputs = held[2]
        y, outputs[index] = outputs[index], None
        if not any(other is not None for other in outputs):
            self._held = None
        return y


class Share:
    """What one Linear runs in place of its own product."""

    def __init__(self, product: SharedProduct, index: int, module: QuantizedLinear):
        self._product, self._index, self._places = product, index, _places(module)

    def __call__(self, module: QuantizedLinear, x: Tensor) -> Tensor:
        """The module's output [..., N] for x [..., K].

        The module multiplies alone where torch compiles or counts no versions of x, where x has gradients or is no
        plain tensor, and where its tensors are elsewhere by now.
        """
        plain = type(x) is Tensor and not x.requires_grad and not x.is_inference()
        if torch.compiler.is_compiling() or not plain or not self.holds(module):
            return module.multiply(x)
        y = self._product.output(self._index, x)
        return module.multiply(x) if y is None else y

    def holds(self, module: QuantizedLinear) -> bool:
        """Whether the module's tensors are where they were."""
        return _places(module) == self._places


def share_products(model: nn.Module) -> None:
    """Let the quantized Linears of one input share a product where they have one; those that do so keep theirs.

    Those are what merge_linears joins, in blocks that the family table describes; Linears that somebody watches, and
    those that are not in the kernels' order, as on a CPU, keep theirs.
    """
    family = known_family(model)
    if family is None or submodule(model, family.blocks) is None:
        return
    devices = set()
    for names in merged_linears(model):
        modules: list[Any] = [submodule(model, name) for name in names]
        if not all(isinstance(module, QuantizedLinear) and module.prepared for module in modules):
            continue
        if any(map(is_watched, modules)) or all(map(_shares, modules)):
            continue
        product = merge_linears(modules).product
        if product is not None:
            devices.add(next(modules[0].parameters()).device)
            shared = SharedProduct(product, [module.out_features for module in modules])
            for index, module in enumerate(modules):
                module.shared = Share(shared, index, module)
    for device in devices:
        if device.type == "cuda":  # the kernels read weights before their predecessors on the stream have ended
            torch.cuda.synchronize(device)


def _shares(module: QuantizedLinear) -> bool:
    return module.shared is not None and module.shared.holds(module)


def _places(module: QuantizedLinear) -> list[int]:
    return [tensor.data_ptr() for tensor in module._parameters.values() if tensor is not None]
