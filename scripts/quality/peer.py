"""What a peer of ``peers.py`` is: how it is called, what it is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.artifact import Calibration
from quantkit.models.experts import separate_experts
from quantkit.models.loading import load_model


@dataclass(frozen=True)
class Setting:
    """One way to call a peer.

    bits: whole but for EXL3; 0 where a type says it. group_size: 0 where the format has no groups. kind: a type's name.
    """

    peer: str
    bits: float
    group_size: int
    kind: str = ""

    @property
    def label(self) -> str:
        """NAME:BITS:GROUP, NAME:BITS or NAME:TYPE."""
        sizes = self.kind or f"{self.bits:g}" + (f":{self.group_size}" if self.group_size else "")
        return f"{self.peer}:{sizes}"

    @property
    def form(self) -> str:
        """Which of these it is, without the name."""
        return "TYPE" if self.kind else "BITS:GROUP" if self.group_size else "BITS"


@dataclass(frozen=True)
class Inputs:
    """What every peer is given. model: a folder or known name. llama_quantize: llama.cpp's program, where named."""

    model: str
    calibration: Calibration
    device: str
    llama_quantize: Path | None = None


@dataclass(frozen=True)
class Quantized:
    """weights: [N, K] by layer, dequantized. stored_bits: of all of them, with scales and what else decodes them.

    told: what else the record of the row holds.
    """

    weights: Mapping[str, Tensor]
    stored_bits: int
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits over weights."""
        return self.stored_bits / sum(weight.numel() for weight in self.weights.values())


@dataclass(frozen=True)
class Peer:
    """package: on PyPI. module: its name in Python. how: the call, for the record. form: of its settings.

    quantize: -> the quantized layers of the model's blocks.
    """

    package: str
    module: str
    quantize: Callable[[Inputs, Setting], Quantized]
    how: str
    form: str = "BITS:GROUP"


def loaded_for_peers(model: str, device: str) -> tuple[Any, Any]:
    """(the model in fp32, tokenizer); experts that transformers fuses are Linears, by their names on the hub."""
    loaded, tokenizer = load_model(model, dtype=torch.float32, device=device)
    separate_experts(loaded)
    return loaded, tokenizer


def grouped(weights: Mapping[str, Tensor], setting: Setting, group_bits: int) -> Quantized:
    """Layers with codes in groups along K, the last one of a row maybe narrower, and group_bits more for each."""
    stored = 0
    for weight in weights.values():
        rows, columns = weight.shape
        stored += rows * (columns * int(setting.bits) + -(-columns // setting.group_size) * group_bits)
    return Quantized(weights, stored)
