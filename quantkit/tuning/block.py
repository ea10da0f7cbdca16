"""Tuning one quantized block: its outputs are moved towards those of the original model's block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from quantkit.models.logits import logits_of
from quantkit.models.stream import ModelStream
from quantkit.models.streaming import BlockInputs, call_block
from quantkit.tuning.install import tunable
from quantkit.tuning.optimize import (
    FP32,
    HIDDEN_COPIES,
    LOGIT_COPIES,
    TuneReport,
    divergence,
    tune,
)
from quantkit.tuning.settings import TuneSettings
from quantkit.tuning.steps import CPU, Loss, Objective

# Held per quantized weight: its code, what it stands for in the graph, the gradient of that. With codes that are chosen
# again also the original weight, the copy of it that is tuned, its gradient, two moments and the best so far.
_WEIGHT_VALUES, _CODE_VALUES = 3, 6


def tune_block(
    block: nn.Module,
    index: int,
    inputs: BlockInputs,
    targets: Tensor,
    settings: TuneSettings,
    *,
    dtype: torch.dtype,
    original: Callable[[str], Tensor] | None = None,
    loss: Loss | None = None,
) -> TuneReport:
    """Lower the squared error of what block ``index`` gives for its inputs; the block is changed in place.

    Scales, offsets, biases and norms are tuned; codes stay, but with ``block_codes``. inputs: of the model whose blocks
    before are quantized.
    targets: [windows, seq_len, hidden_size]; what the original block gives in the original model makes the block also
    make up for the errors of those before it. dtype: what norms and biases are stored in. original: name of a Linear in
    the block -> its weight [N, K] before quantization, which ``block_codes`` needs. loss: what is lowered in place of
    the error. Errors are shares of the mean square of the targets.
    """
    with torch.enable_grad(), tunable(block, original if settings.block_codes else None) as tuned:
        objective = Objective(
            loss or output_error(block, index, inputs, targets),
            len(targets),
            at_once=max(inputs.batched, default=1) if loss is None else 1,
            dtype=dtype,
            of=f"quantized block {index}",
            shown=False,
            device=_place(inputs.hidden, targets) if loss is None else CPU,
        )
        once = replace(settings, epochs=settings.blocks)
        return tune(list(tuned.parts.values()), list(tuned.others.values()), objective, once)


def _place(hidden: Tensor, targets: Tensor) -> torch.device:
    """Where windows are read by their numbers; the CPU where one of the two had no room on the GPU."""
    return hidden.device if hidden.device == targets.device else CPU


def output_error(block: nn.Module, index: int, inputs: BlockInputs, targets: Tensor) -> Loss:
    """The mean squared error of a block's outputs, as a share of the mean square of the targets."""
    size = torch.stack([window.float().square().mean() for window in targets]).mean().item() or 1.0

    def error(numbers: Tensor) -> Tensor:
        output = call_block(block, inputs, index, inputs.hidden.index_select(0, numbers.to(inputs.hidden.device)))
        wanted = targets.index_select(0, numbers.to(targets.device)).to(output)
        return (output - wanted).square().mean() * len(numbers)

    def mean(numbers: Tensor) -> Tensor:
        batches = numbers.split(inputs.batches(len(numbers)))
        return torch.stack([error(batch) for batch in batches]).sum() / (len(numbers) * size)

    return mean


def prediction_error(stream: ModelStream, inputs: BlockInputs, targets: Tensor, windows: Tensor) -> Loss:
    """KL(original || model) in nats per token of what the model's own code makes of the last block's outputs.

    targets: as tune_block takes them. windows: [n, seq_len] of ids. What is outside the blocks is in memory, and both
    models' predictions are made by it.
    """
    index = len(stream.blocks) - 1
    block = stream.blocks[index][1]

    def predicted(hidden: Tensor, number: int) -> Tensor:
        return logits_of(stream, inputs, hidden, windows[number]).float().log_softmax(dim=-1)

    def error(number: int) -> Tensor:
        output = call_block(block, inputs, index, inputs.hidden[number][None])
        with torch.no_grad():
            wanted = predicted(targets[number][None].to(output), number)
        return divergence(predicted(output, number), wanted)

    return lambda numbers: torch.stack([error(number) for number in numbers.tolist()]).mean()


def block_tuning_bytes(
    quantized: int,
    tokens: int,
    hidden_size: int,
    settings: TuneSettings,
    *,
    outside: int,
    vocabulary: int,
    seq_len: int,
) -> int:
    """What tune_block holds at its peak beside the block, so many of whose weights are quantized.

    tokens: that run through the block at once. outside: parameters outside the blocks, which predictions of so large a
    vocabulary take, where these are tuned, of seq_len tokens at a time.
    """
    values = _WEIGHT_VALUES + (_CODE_VALUES if settings.block_codes else 0)
    predictions = outside + LOGIT_COPIES * seq_len * vocabulary if settings.logits else 0
    return FP32 * (values * quantized + HIDDEN_COPIES * tokens * hidden_size + predictions)
