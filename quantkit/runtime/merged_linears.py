"""Linears that read one input (q, k, v; gate, up) as one product, while single tokens are decoded.

Their tensors become views of one tensor, so this takes no memory and each can still run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quantkit.formats.bcq import BcqSpec
from quantkit.models.families import decoder_blocks, family_of
from quantkit.nn.quantized_linear import QuantizedLinear
from quantkit.nn.table import LINEARS
from quantkit.ops.bcq.autotune import ensure_measured
from quantkit.ops.bcq.instances import TILE_N
from quantkit.ops.bcq.layout import BcqTiles

Product = Callable[[Tensor], Tensor]


@dataclass
class Siblings:
    """Linears of one input and their common product.

    places: where their tensors were when it was made. outputs: those of ``seen``, the input last multiplied.
    """

    modules: tuple[nn.Module, ...]
    product: Product
    places: tuple[int, ...] = ()
    seen: Tensor | None = None
    outputs: tuple[Tensor, ...] = ()

    def forwards(self) -> list[tuple[nn.Module, Product]]:
        """Each module with what it may run in the place of its own forward."""
        return [(module, partial(self._output, index)) for index, module in enumerate(self.modules)]

    def in_place(self) -> bool:
        """Whether no tensor was moved or replaced since."""
        return self.places == _places(self.modules)

    def forget(self) -> None:
        """Let go of the last input."""
        self.seen, self.outputs = None, ()

    def _output(self, index: int, x: Tensor) -> Tensor:
        if self.seen is not x:
            rows = [int(module.out_features) for module in self.modules]  # type: ignore[arg-type]
            self.seen, self.outputs = x, self.product(x).split(rows, dim=-1)
        return self.outputs[index]


_joined: WeakKeyDictionary[nn.Module, tuple[Siblings, ...]] = WeakKeyDictionary()


def join_siblings(model: nn.Module) -> tuple[Siblings, ...]:
    """The sibling Linears of every decoder block: plain ones, and ``bcq`` ones in the kernels' order of equal specs.

    Found again without any work as long as the model's tensors stay where they are.
    """
    if model not in _joined or not all(group.in_place() for group in _joined[model]):
        _joined[model] = _join_all(model)
    return _joined[model]


def _places(modules: Sequence[nn.Module]) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for module in modules for parameter in module.parameters())


def _join_all(model: nn.Module) -> tuple[Siblings, ...]:
    joined: list[Siblings] = []
    for _, block in decoder_blocks(model):
        for feed in family_of(model).feeds:
            modules = [block.get_submodule(name) for name in feed.targets] if len(feed.targets) > 1 else []
            product = _join(modules) if modules else None
            if product is not None:
                joined.append(Siblings(tuple(modules), product, _places(modules)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the kernels read weights before their predecessors on the stream have ended
    return tuple(joined)


def _join(modules: Sequence[Any]) -> Product | None:
    with_bias = [module.bias is not None for module in modules]
    if any(with_bias) != all(with_bias):
        return None
    if all(type(module) is nn.Linear for module in modules):
        return partial(linear, weight=_whole([m.weight for m in modules]), bias=_whole_bias(modules))
    if all(_is_tiled(module) for module in modules) and len({module.spec for module in modules}) == 1:
        return _join_tiles(modules)
    return None


def _is_tiled(module: Any) -> bool:
    packed = isinstance(module, QuantizedLinear) and isinstance(module.spec, BcqSpec)
    return packed and module.prepared and module.out_features % TILE_N == 0


def _join_tiles(modules: Sequence[QuantizedLinear]) -> Product:
    first, rows = modules[0], sum(module.out_features for module in modules)
    names = [name for name, _ in first.named_parameters() if name != "bias"]
    tensors = {name: _whole([m.get_parameter(name) for m in modules]) for name in names}
    weight = BcqTiles(
        tensors["tiles"],
        tensors["scale_tiles"],
        tensors.get("factor_tiles"),
        rows,
        first.in_features,
        first.spec.group_size,
    )
    if weight.tiles.is_cuda:
        ensure_measured(weight)
    forward = LINEARS[first.format_name].prepared_forward
    assert forward is not None
    bias = _whole_bias(modules)
    return lambda x: forward(first.spec, tensors, (rows, first.in_features), x, bias)


def _whole_bias(modules: Sequence[Any]) -> Tensor | None:
    return None if modules[0].bias is None else _whole([module.bias for module in modules])


def _whole(parts: Sequence[nn.Parameter]) -> Tensor:
    """The parts one after the other along dimension 0, in one tensor that they are views of from now on."""
    ends = [part.data_ptr() + part.nbytes for part in parts]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and ends[:-1] == [part.data_ptr() for part in parts[1:]]:
        shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
        return parts[0].detach().as_strided(shape, parts[0].stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = view
    return whole
