"""The windows that a model is calibrated on: of a text, written by the model itself, or some of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.artifact import TextSource
from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, shuffled_windows, tokenize
from quantkit.models.stream import ModelStream
from quantkit.ranks import ALONE, Ranks

WRITTEN = "written by the model"
"""The name of such windows where an artifact tells its texts."""


@dataclass(frozen=True)
class Written:
    """Windows that are of no corpus. count: how many. write: makes them, [count, seq_len] int64 ids."""

    count: int
    write: Callable[[], Tensor]


@dataclass(frozen=True)
class DrawnWindows:
    """windows: [n, seq_len] int64 ids. texts: what they are of."""

    windows: Tensor
    texts: tuple[TextSource, ...]


def draw_windows(
    stream: ModelStream,
    tokenizer: Any,
    corpus: Corpus | None,
    *,
    windows: int,
    seq_len: int,
    seed: int,
    written: Written | None = None,
    ranks: Ranks = ALONE,
) -> DrawnWindows:
    """Windows in seeded random order, some of them written by the model and the others of the corpus.

    windows: how many in all. corpus: None where the model writes all. ranks: the first one writes, all get the same.
    Raises DataError for a window or a text of the wrong length, ModelError for ids that the model has no embedding for,
    both before anything is written.
    """
    check_seq_len(seq_len, stream.model)
    parts: list[Tensor] = []
    texts: list[TextSource] = []
    if corpus is not None:
        count = windows - (written.count if written else 0)
        ids = tokenize(tokenizer, corpus.text, name=corpus.name)
        check_vocabulary(ids, stream.model, name=corpus.name)
        parts.append(shuffled_windows(ids, seq_len, count, seed=seed, name=corpus.name))
        texts.append(TextSource(name=corpus.name, sha256=corpus.sha256, seed=seed, windows=count))
    if written:
        parts.append(ranks.lead(written.write))
        texts.append(TextSource(name=WRITTEN, sha256=digest(parts[-1]), seed=seed, windows=written.count))
    return DrawnWindows(mixed(parts, seed), tuple(texts))


def mixed(parts: Sequence[Tensor], seed: int) -> Tensor:
    """All windows [n, seq_len] of the parts, in seeded random order where there are several."""
    windows = torch.cat(list(parts))
    if len(parts) == 1:
        return windows
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]


def digest(windows: Tensor) -> str:
    """sha256 of the ids, as int32."""
    return sha256(windows.to(torch.int32).numpy().tobytes()).hexdigest()
