"""Tuning one quantized block: its outputs are moved towards those of the original model's block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantkit.models.streaming import BlockInputs, call_block
from quantkit.tuning.install import tunable
from quantkit.tuning.optimize import Loss, Objective, TuneReport, tune
from quantkit.tuning.settings import TuneSettings

_FP32 = 4
# Held per quantized weight: its code, what it stands for in the graph, the gradient of that. With codes that are chosen
# again also the original weight, the copy of it that is tuned, its gradient, two moments and the best so far.
_WEIGHT_VALUES, _CODE_VALUES = 3, 6
_HIDDEN_COPIES = 40  # of a hidden state that the graph of a block holds


def tune_block(
    block: nn.Module,
    index: int,
    inputs: BlockInputs,
    targets: Tensor,
    settings: TuneSettings,
    *,
    dtype: torch.dtype,
    original: Callable[[str], Tensor] | None = None,
) -> TuneReport:
    """Lower the squared error of what block ``index`` gives for its inputs; the block is changed in place.

    Scales, offsets, biases and norms are tuned; codes stay, but with ``block_codes``. inputs: of the model whose blocks
    before are quantized.
    targets: [windows, seq_len, hidden_size]; what the original block gives in the original model makes the block also
    make up for the errors of those before it. dtype: what norms and biases are stored in. original: name of a Linear in
    the block -> its weight [N, K] before quantization, which ``block_codes`` needs.
    Losses are shares of the mean square of the targets.
    """
    with torch.enable_grad(), tunable(block, original if settings.block_codes else None) as tuned:
        objective = Objective(
            output_error(block, index, inputs, targets),
            len(targets),
            at_once=1,
            dtype=dtype,
            of=f"quantized block {index}",
            shown=False,
        )
        once = replace(settings, epochs=settings.blocks)
        return tune(list(tuned.parts.values()), list(tuned.others.values()), objective, once)


def output_error(block: nn.Module, index: int, inputs: BlockInputs, targets: Tensor) -> Loss:
    """The mean squared error of a block's outputs, as a share of the mean square of the targets."""
    size = torch.stack([window.float().square().mean() for window in targets]).mean().item() or 1.0

    def error(number: int) -> Tensor:
        output = call_block(block, inputs, index, inputs.hidden[number][None])
        return (output - targets[number][None].to(output)).square().mean()

    return lambda numbers: torch.stack([error(number) for number in numbers.tolist()]).mean() / size


def block_tuning_bytes(quantized: int, seq_len: int, hidden_size: int, *, codes: bool) -> int:
    """What tune_block holds at its peak beside the block, so many of whose weights are quantized.

    codes: whether they are chosen again.
    """
    values = _WEIGHT_VALUES + (_CODE_VALUES if codes else 0)
    return _FP32 * (values * quantized + _HIDDEN_COPIES * seq_len * hidden_size)
