"""Watching what flows into Linears, once for those that share one input tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from quantkit.errors import ModelError


class InputTap:
    """While entered, hands every distinct input of the watched Linears to ``consume``.

    consume(name, x): x [tokens, K], flattened, in the model's dtype. Consecutive Linears that are given the very
    same tensor (q, k, v; gate, up) count as one, under the name of the first.
    aliases: every watched name seen so far -> the name its input was consumed under.
    """

    def __init__(self, linears: Mapping[str, nn.Module], consume: Callable[[str, Tensor], None]):
        self.aliases: dict[str, str] = {}
        self._linears, self._consume = linears, consume
        self._handles: list[RemovableHandle] = []
        self._last: tuple[Tensor, str] | None = None

    def __enter__(self) -> InputTap:
        self._handles = [m.register_forward_pre_hook(self._hook(name)) for name, m in self._linears.items()]
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._last = [], None

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def watch(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            x = arguments[0]
            owner = self._last[1] if self._last is not None and self._last[0] is x else name
            if self.aliases.setdefault(name, owner) != owner:
                raise ModelError(
                    f"{name}: shares its input with {self.aliases[name]} in some calls only; not supported"
                )
            if owner == name:
                self._last = (x, name)
                self._consume(name, x.detach().reshape(-1, x.shape[-1]))

        return watch
