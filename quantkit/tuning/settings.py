"""The recipe's ``tune`` section: what is tuned, on how much text, for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from quantkit.errors import RecipeError
from quantkit.recipe import nearest


@dataclass(frozen=True)
class TuneSettings:
    """blocks: passes over the calibration windows for each block, as soon as it is quantized. blend: what it is moved
    towards: 1 is what the original block gives in the original model, 0 what it gives for the quantized model's hidden
    states, a value between is their mixture. block_codes: whether these passes choose the code of every weight again at
    each step. logits: whether the passes for the last block lower the divergence of its predictions from the original
    model's, in place of the error of its outputs. epochs: passes for the whole model afterwards; 0 only after
    ``blocks``.
    codes: whether these choose codes again, or leave them as they are. Codes of method trellis stay in either.
    written: windows, as long as the calibration's, that the original model writes itself for the passes of the whole
    model beside those. They take little time, and passes over few windows gain far less on other text.
    embeddings: whether these also tune the embeddings of the tokens and, where it is not quantized, the head.
    rate: the first step of a value, as a share of the root mean square of its tensor; steps shrink to 0. The more steps
    there are, the smaller they should be (docs/quality.md, windows that the model writes).
    epoch_rate: the same in passes for the whole model behind tuned blocks; without blocks these take rate.
    code_rate: the same of the weights that codes are chosen for. epoch_code_rate: the same of those in passes for the
    whole model behind tuned blocks; without blocks these take code_rate.
    batch: windows per step. epoch_batch: the same in passes for the whole model behind tuned blocks, 0 for as many as
    batch; without blocks these take batch.
    held_out: share of the windows, the last ones, that decide which pass is kept. seed: of the order of the windows and
    of what is written.
    """

    blocks: int = 0
    blend: float = 1.0
    block_codes: bool = False
    logits: bool = False
    epochs: int = 8
    written: int = 0
    codes: bool = False
    embeddings: bool = False
    rate: float = 0.003
    epoch_rate: float = 0.001
    code_rate: float = 0.003
    epoch_code_rate: float = 0.0005
    batch: int = 4
    epoch_batch: int = 0
    held_out: float = 0.125
    seed: int = 0

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise RecipeError(f"blocks is {self.blocks}; choose 0 passes or more")
        if not 0 <= self.blend <= 1:
            raise RecipeError(f"blend is {self.blend}; choose a share from 0 to 1")
        if self.blend != 1 and not self.blocks:
            raise RecipeError(f"blend is {self.blend}, but blocks is 0: it is of the targets of blocks")
        if self.block_codes and not self.blocks:
            raise RecipeError("block_codes is true, but blocks is 0: it is of the passes for blocks")
        if self.logits and not self.blocks:
            raise RecipeError("logits is true, but blocks is 0: it is of the passes for the last block")
        if self.logits and self.blend != 1:
            raise RecipeError(f"logits is true, but blend is {self.blend}; choose 1: predictions are the original's")
        if self.epochs < (0 if self.blocks else 1):
            raise RecipeError(f"epochs is {self.epochs}; choose 1 or more, or 0 with blocks")
        if self.codes and not self.epochs:
            raise RecipeError("codes is true, but epochs is 0: choose block_codes for the passes of blocks")
        if self.embeddings and not self.epochs:
            raise RecipeError("embeddings is true, but epochs is 0: they are of the passes for the whole model")
        if self.written and not self.epochs:
            raise RecipeError(f"written is {self.written}, but epochs is 0: they are for the passes of the whole model")
        if self.batch < 1:
            raise RecipeError(f"batch is {self.batch}; choose 1 window a step or more")
        if not 0 < self.held_out < 1:
            raise RecipeError(f"held_out is {self.held_out}; choose a share between 0 and 1")
        for name in ("rate", "epoch_rate", "code_rate", "epoch_code_rate", "epoch_batch", "written"):
            if getattr(self, name) < 0:
                raise RecipeError(f"{name} is {getattr(self, name)}; choose 0 or more")


def for_whole_model(settings: TuneSettings) -> TuneSettings:
    """The settings with the rates and windows per step that passes for the whole model take.

    What tuned blocks leave to gain is small, and larger steps lose more than that at first.
    """
    if not settings.blocks:
        return settings
    return replace(
        settings,
        rate=settings.epoch_rate,
        code_rate=settings.epoch_code_rate,
        batch=settings.epoch_batch or settings.batch,
    )


def tune_settings(recipe: str, values: Mapping[str, Any]) -> TuneSettings:
    """The settings of a recipe's ``tune`` section. Raises RecipeError naming the recipe and the setting."""
    known = {field.name: type(field.default) for field in fields(TuneSettings)}
    for key, value in values.items():
        if key not in known:
            raise RecipeError(f"recipe {recipe}: tune has no setting {key!r}; {nearest(str(key), known)}")
        wanted = known[key]
        whole_for_float = wanted is float and type(value) is int
        if (type(value) is not wanted and not whole_for_float) or value != value:
            raise RecipeError(f"recipe {recipe}: tune: {key} is {value!r}, expected {wanted.__name__}")
    try:
        return TuneSettings(**values)
    except RecipeError as error:
        raise RecipeError(f"recipe {recipe}: tune: {error}") from error
