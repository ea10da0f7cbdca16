"""What is to be done with the blocks of a model, and what was done so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from quantkit.calibration.artifact import Calibration
from quantkit.checkpoint.config import AttentionScales, Prefix, StoredLayer
from quantkit.formats.table import spec_from_json, spec_to_json
from quantkit.methods import METHODS, LayerPlan
from quantkit.models.stream import ModelStream
from quantkit.ranks import ALONE, Ranks
from quantkit.tuning.settings import TuneSettings


@dataclass(frozen=True)
class BlockWork:
    """What is to be done. dtype: of what stays floating point. activations: what hidden states are stored in.

    attention: whether the ranges of Q, K and V are taken. ranks: those that share the work. prefix: what every text
    stands behind, or None. tuning: of the blocks one by one and then of the whole model, or None.
    """

    stream: ModelStream
    plans: Mapping[str, LayerPlan]
    artifact: Calibration | None
    dtype: torch.dtype
    activations: torch.dtype
    attention: bool
    ranks: Ranks = ALONE
    prefix: Prefix | None = None
    tuning: TuneSettings | None = None

    @property
    def tunes_blocks(self) -> bool:
        """Whether each block is tuned towards what the original model's gives."""
        return self.tuning is not None and self.tuning.blocks > 0

    @property
    def models(self) -> int:
        """Whose hidden states flow through the blocks: the quantized model's and, for tuning, the original's."""
        return 2 if self.tunes_blocks else 1

    @property
    def streams(self) -> bool:
        """Whether text runs through the blocks: for Hessians, for the ranges of attention, or for tuning them."""
        needs = any(METHODS[plan.method].needs_hessian(plan.settings) for plan in self.plans.values())
        return self.attention or self.tunes_blocks or needs


@dataclass
class Done:
    """What was done so far. transforms: by method. layers: the report of each. stored, attention: for the config.

    tuned_blocks: the report of each, by its name. prefix_hidden: what the next block's prefix is computed from, where
    there is one.
    """

    transforms: dict[str, dict[str, Any]] = field(default_factory=dict)
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored: dict[str, StoredLayer] = field(default_factory=dict)
    attention: dict[str, AttentionScales] = field(default_factory=dict)
    tuned_blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    prefix_hidden: list[float] | None = None

    def to_json(self) -> dict[str, Any]:
        """What a piece of the work remembers."""
        stored = {name: [spec_to_json(one.spec), list(one.shape)] for name, one in self.stored.items()}
        attention = {name: asdict(scales) for name, scales in self.attention.items()}
        document = {"transforms": self.transforms, "layers": self.layers, "stored": stored, "attention": attention}
        optional = {"prefix_hidden": self.prefix_hidden, "tuned_blocks": self.tuned_blocks or None}
        return document | {key: value for key, value in optional.items() if value is not None}

    def add(self, document: Mapping[str, Any]) -> None:
        """Take in what to_json gave for a further part of the model."""
        for method, report in document["transforms"].items():
            known = self.transforms.setdefault(method, {})
            for key, value in report.items():
                known[key] = known.get(key, []) + value if isinstance(value, list) else value
        self.layers |= document["layers"]
        self.tuned_blocks |= document.get("tuned_blocks", {})
        self.prefix_hidden = document.get("prefix_hidden", self.prefix_hidden)
        for name, (spec, (rows, columns)) in document["stored"].items():
            self.stored[name] = StoredLayer(spec_from_json(spec), (rows, columns))
        self.attention |= {name: AttentionScales(**scales) for name, scales in document["attention"].items()}
