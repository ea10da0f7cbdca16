"""The windows that a model is calibrated on: of a text, or written by the model itself.

Tuning moves the quantized model towards the original on these windows, so it gains most where they are like what the
model is used on. A model that writes them itself, drawing token after token from its own predictions, gives text like
the one that it was trained on. Source: LLM-QAT (Liu et al. 2023), section 3.1. Deviation: windows begin with the token
that begins a text, and all others are drawn; LLM-QAT begins with any token and takes the most probable ones at first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from quantkit.calibration.artifact import TextSource
from quantkit.data.corpora import Corpus
from quantkit.data.windows import check_seq_len, check_vocabulary, shuffled_windows, tokenize
from quantkit.errors import DataError
from quantkit.models.stream import ModelStream
from quantkit.progress import track
from quantkit.ranks import ALONE, Ranks
from quantkit.runtime.generation import Runner, new_tokens, start
from quantkit.runtime.sampling import Sampling, drawer

WRITTEN = "written by the model"
"""The name of such windows where an artifact tells its texts."""

_AT_ONCE = 64  # windows written at once, where the cache of so many takes no more than _CACHE_BYTES
_CACHE_BYTES = 4 << 30
_KEY_AND_VALUE_BYTES = 2 * 4  # in fp32


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
    written: int = 0,
    ranks: Ranks = ALONE,
) -> DrawnWindows:
    """Windows in seeded random order, ``written`` of them by the model and the others of the corpus.

    corpus: None where the model writes all. ranks: the first one writes, all get the same.
    Raises DataError for a window or a text of the wrong length, ModelError for ids that the model has no embedding for.
    """
    check_seq_len(seq_len, stream.model)
    parts: list[Tensor] = []
    texts: list[TextSource] = []
    if corpus is not None:
        count = windows - written
        ids = tokenize(tokenizer, corpus.text, name=corpus.name)
        check_vocabulary(ids, stream.model, name=corpus.name)
        parts.append(shuffled_windows(ids, seq_len, count, seed=seed, name=corpus.name))
        texts.append(TextSource(name=corpus.name, sha256=corpus.sha256, seed=seed, windows=count))
    if written:
        parts.append(ranks.lead(lambda: written_windows(stream, tokenizer, written, seq_len, seed=seed)))
        texts.append(TextSource(name=WRITTEN, sha256=digest(parts[-1]), seed=seed, windows=written))
    chosen = torch.cat(parts)
    if len(parts) > 1:
        chosen = chosen[torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))]
    return DrawnWindows(chosen, tuple(texts))


def digest(windows: Tensor) -> str:
    """sha256 of the ids, as int32."""
    return sha256(windows.to(torch.int32).numpy().tobytes()).hexdigest()


@torch.no_grad()
def written_windows(stream: ModelStream, tokenizer: Any, count: int, seq_len: int, *, seed: int) -> Tensor:
    """Windows [count, seq_len] int64 that the model writes: every token behind the first is drawn from its predictions.

    A text that ends before the window does is followed by the next one, as in the texts of training. All of the model
    is in memory meanwhile. Raises DataError where the tokenizer has no token that begins a text, GenerationError for a
    window longer than the model's sliding one.
    """
    first, draw = _first_token(tokenizer, stream.model), drawer(Sampling(temperature=1.0, seed=seed), stream.device)
    sizes = [len(part) for part in torch.arange(count).split(_at_once(stream.model, seq_len))]
    found: list[Tensor] = []

    def tokens() -> Iterator[Tensor]:
        for size in sizes:
            ids = torch.full((size, 1), first, device=stream.device)
            session = start(model, ids, seq_len, runner=Runner(model), draw=draw)
            yield from new_tokens(session, seq_len - 1)
            found.append(session.tokens[:, :seq_len].cpu())

    with stream.whole() as model:
        for _ in track(tokens(), "windows written, tokens", total=len(sizes) * (seq_len - 1)):
            pass
    return torch.cat(found)


def _first_token(tokenizer: Any, model: Any) -> int:
    """The token that begins a text, or else the one that ends the text before it."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise DataError(
        f"{type(model).__name__}: its tokenizer has no token that begins or ends a text, so the model cannot write "
        "windows; calibrate on a text alone"
    )


def _at_once(model: Any, seq_len: int) -> int:
    """How many windows are written at once; by the model alone, as other numbers draw other tokens."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = _KEY_AND_VALUE_BYTES * config.num_hidden_layers * heads * width * seq_len
    return max(1, min(_AT_ONCE, _CACHE_BYTES // window))
