"""Linears that read one input (q, k, v; gate, up) as one product, and products with what follows them.

Their tensors become parts of one: each Linear gets Parameters that are views of it in the place of its own. So merging
takes no memory, and each Linear still runs, is saved and moves by itself. A Linear whose tensors moved has its own
again, and the next session merges anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.formats.base import Shape, Tensors
from quantkit.formats.bcq import BcqSpec
from quantkit.nn.bcq_linear import prepared_weight
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import LINEARS
from quantkit.ops.bcq.arranged import InputOrder, ProductInput
from quantkit.ops.bcq.autotune import ensure_measured
from quantkit.ops.bcq.instances import TILE_N
from quantkit.ops.epilogue import NO_EPILOGUE, Epilogue

Product = Callable[[Any], Tensor]
"""y [..., N] of x [..., K]; an EpilogueProduct also takes an ArrangedInput."""


@dataclass(frozen=True, eq=False)
class EpilogueProduct:
    """A product with what follows it: of x [..., K] as it is, or in ``input_order`` of what is like it.

    multiply, order: epilogue_forward and input_order of a row of LINEARS, but for x and the epilogue.
    """

    multiply: Callable[[ProductInput, Epilogue], Tensor]
    order: Callable[[Tensor, Epilogue], InputOrder | None]

    def __call__(self, x: ProductInput, epilogue: Epilogue = NO_EPILOGUE) -> Tensor:
        """The epilogue of y [..., N]."""
        return self.multiply(x, epilogue)

    def input_order(self, like: Tensor, epilogue: Epilogue = NO_EPILOGUE) -> InputOrder | None:
        """The order in which the kernel that writes x [..., K] spares this product a launch; None where none does.

        like: of x's shape, type and device.
        """
        return self.order(like, epilogue)


@dataclass(frozen=True, eq=False)
class MergedLinears:
    """Linears of one input, and their common product where they have one."""

    modules: tuple[Any, ...]
    product: Product | None

    def __call__(self, x: ProductInput) -> tuple[Tensor, ...]:
        """The output [..., N] of each Linear for x [..., K], as it is or in ``input_order``."""
        if self.product is None:
            return tuple(module(x) for module in self.modules)
        return self.product(x).split([module.out_features for module in self.modules], dim=-1)

    def input_order(self, like: Tensor) -> InputOrder | None:
        """That of the common product, see EpilogueProduct."""
        return self.product.input_order(like) if isinstance(self.product, EpilogueProduct) else None


def merge_linears(modules: Sequence[nn.Module]) -> MergedLinears:
    """The Linears with a common product: plain ones, and ``bcq`` ones in the kernels' order of equal specs.

    Any others, Linears on several devices or of several types, and a single one run by themselves; so do those of the
    ``trellis`` format, as the planes of several are in no order that each is a part of. Merging again finds the tensors
    merged.
    """
    return MergedLinears(tuple(modules), _common_product(modules) if len(modules) > 1 else None)


def _common_product(modules: Sequence[Any]) -> Product | None:
    if all(type(module) is nn.Linear for module in modules) and _alike(modules):
        return partial(linear, weight=_whole(modules, "weight"), bias=joined_bias(modules))
    return _tiled_product(modules) if are_tiled_alike(modules) else None


def are_tiled_alike(modules: Sequence[Any]) -> bool:
    """Whether the modules are ``bcq`` Linears of one spec, in the kernels' order and of whole tiles, on one device."""
    return all(map(_is_tiled, modules)) and len({module.spec for module in modules}) == 1 and _alike(modules)


def _alike(modules: Sequence[nn.Module]) -> bool:
    kinds = {tuple((name, p.dtype, p.device, p.shape[1:]) for name, p in m.named_parameters()) for m in modules}
    return len(kinds) == 1


def _is_tiled(module: Any) -> bool:
    packed = isinstance(module, QuantizedLinear) and isinstance(module.spec, BcqSpec)
    return packed and module.prepared and module.out_features % TILE_N == 0


def _tiled_product(modules: Sequence[QuantizedLinear]) -> EpilogueProduct:
    first, shape = modules[0], (sum(module.out_features for module in modules), modules[0].in_features)
    tensors = joined_tensors(modules)
    weight = prepared_weight(first.spec, tensors, shape)
    if weight.tiles.is_cuda:
        ensure_measured(weight)
    product = _epilogue_product(first, tensors, shape, joined_bias(modules))
    assert product is not None
    return product


def product_with_epilogue(module: nn.Module) -> EpilogueProduct | None:
    """The product of a Linear's tensors as they are now with what follows it, or None where no kernel has both."""
    if not isinstance(module, QuantizedLinear) or not module.prepared:
        return None
    return _epilogue_product(module, module.held, module.shape, module.bias)


def _epilogue_product(
    module: QuantizedLinear, held: Tensors, shape: Shape, bias: Tensor | None
) -> EpilogueProduct | None:
    row, spec = LINEARS[module.format_name], module.spec
    forward, order = row.epilogue_forward, row.input_order
    if forward is None:
        return None
    assert order is not None  # a row has both or neither
    return EpilogueProduct(
        lambda x, epilogue: forward(spec, held, shape, x, bias, epilogue),
        lambda like, epilogue: order(spec, held, shape, like, bias, epilogue),
    )


def joined_tensors(modules: Sequence[QuantizedLinear]) -> dict[str, Tensor]:
    """The modules' stored tensors along dimension 0, each in one that theirs are views of from now on."""
    return {name: _whole(modules, name) for name in modules[0].held}


def joined_bias(modules: Sequence[Any]) -> Tensor | None:
    """The modules' biases, likewise."""
    return None if modules[0].bias is None else _whole(modules, "bias")


def _whole(modules: Sequence[nn.Module], name: str) -> Tensor:
    """The modules' parameters of that name along dimension 0, in one tensor that they are views of from now on."""
    parts = [module.get_parameter(name) for module in modules]
    ends = [part.data_ptr() + part.nbytes for part in parts]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return parts[0].detach().as_strided(shape, parts[0].stride())
    whole = torch.cat([part.detach() for part in parts])
    views = whole.split([len(part) for part in parts])
    for module, part, view in zip(modules, parts, views, strict=True):
        module.register_parameter(name, nn.Parameter(view, requires_grad=part.requires_grad))
    return whole
