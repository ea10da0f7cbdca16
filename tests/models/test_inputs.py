"""The tap on Linear inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantkit.errors import ModelError
from quantkit.models.inputs import InputTap


def test_one_tensor_is_consumed_once_and_aliased() -> None:
    linears = {name: nn.Linear(4, 4) for name in ("q", "k", "o")}
    seen: list[tuple[str, tuple[int, ...]]] = []
    x = torch.randn(2, 3, 4)
    with InputTap(linears, lambda name, rows: seen.append((name, tuple(rows.shape)))) as tap:
        linears["q"](x)
        linears["k"](x)
        linears["o"](x.clone())
    linears["q"](x)
    assert seen == [("q", (6, 4)), ("o", (6, 4))]
    assert tap.aliases == {"q": "q", "k": "q", "o": "o"}


def test_sharing_in_some_calls_only_is_refused() -> None:
    linears = {name: nn.Linear(4, 4) for name in ("q", "k")}
    x = torch.randn(3, 4)
    with InputTap(linears, lambda name, rows: None):
        linears["q"](x)
        linears["k"](x)
        linears["q"](x.clone())
        with pytest.raises(ModelError, match="shares its input with q"):
            linears["k"](x.clone())
