"""Finding the tokens that take massive channels away from the text when they stand in front of it (PrefixQuant).

Source: Chen et al. 2024, section 4. Deviation: PrefixQuant takes the tokens that are outliers most often, and the first
one. Which token stands first decides whether the text's own first token grows massive all the same, so tokens are
tried here: a prefix is as good as the text behind it is even.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quantkit.models.families import block_linears
from quantkit.models.inputs import InputTap
from quantkit.models.prefix import check_takes_prefix
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import advance, capture_inputs
from quantkit.progress import track

MOST_TOKENS = 4
_TRIED = 6  # tokens a place
_TEXTS, _TEXT_TOKENS = 4, 64  # that each is judged on
_LEAST_GAIN = 0.1  # of the score, for each token
_LEAST_FALL = 1.0  # of the score likewise: every text sees the prefix, also where nothing sticks out of it
_EVEN = 8.0  # largest over median where no token is an outlier


@torch.no_grad()
def find_prefix(stream: ModelStream, tokenizer: Any, windows: Tensor) -> tuple[int, ...]:
    """The tokens of the prefix; none where texts are about as even without.

    windows: [n, seq_len] of the calibration. Raises ModelError for a model that takes no prefix.
    """
    check_takes_prefix(stream.model)
    texts = windows[:_TEXTS, :_TEXT_TOKENS]
    frequent = [token for token, _ in Counter(windows.flatten().tolist()).most_common(_TRIED)]
    special = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None]
    prefix: tuple[int, ...] = ()
    (score,), _ = _judge(stream, [prefix], texts)
    tried = list(dict.fromkeys([*special, *frequent]))[:_TRIED]
    while len(prefix) < MOST_TOKENS:
        scores, outliers = _judge(stream, [(*prefix, token) for token in tried], texts)
        best = min(range(len(tried)), key=scores.__getitem__)
        if score - scores[best] < max(_LEAST_FALL, _LEAST_GAIN * score):
            break
        prefix, score = (*prefix, tried[best]), scores[best]
        tried = [token for token in outliers[best] if token not in prefix][:_TRIED]
        if not tried:
            break
    return prefix


def _judge(
    stream: ModelStream, prefixes: Sequence[tuple[int, ...]], texts: Tensor
) -> tuple[list[float], list[list[int]]]:
    """Of each prefix: how uneven texts behind it are, and the tokens that stick out there, the farthest first.

    Uneven: over all inputs of Linears, the sum of the logarithms by which the largest |x| of any token, over the median
    of the tokens' largest, is beyond what it is where no token is an outlier.
    """
    length, count = len(prefixes[0]), len(texts)
    rows = torch.cat(
        [torch.cat([torch.tensor(p, dtype=torch.long).expand(count, -1), texts.long()], dim=1) for p in prefixes]
    )
    inputs = replace(capture_inputs(stream, rows), batched={})  # what flows into a Linear is of one text
    linears = block_linears(stream.model)
    scores, reach = [0.0] * len(prefixes), [torch.zeros(texts.numel()) for _ in prefixes]
    for index, (name, _) in enumerate(track(stream.blocks, "looking for a prefix")):
        peaks: dict[str, list[Tensor]] = {}

        def keep(owner: str, x: Tensor, into: dict[str, list[Tensor]] = peaks) -> None:
            into.setdefault(owner, []).append(x.abs().amax(dim=-1)[length:].float().cpu())

        own = {linear: module for linear, module in linears.items() if stream.owner(linear) == name}
        with stream.block(index) as block, InputTap(own, keep):
            inputs = advance(block, inputs, index)
        for of_windows in peaks.values():
            for number in range(len(prefixes)):
                tokens = torch.cat(of_windows[number * count : (number + 1) * count])
                above = (tokens / tokens.median().clamp_min(torch.finfo(torch.float32).tiny)).log()
                scores[number] += max(0.0, above.max().item() - math.log(_EVEN))
                reach[number] = reach[number].maximum(above)
    flat = texts.flatten()
    orders = [flat[values.argsort(descending=True, stable=True)].tolist() for values in reach]
    return scores, [list(dict.fromkeys(order)) for order in orders]
