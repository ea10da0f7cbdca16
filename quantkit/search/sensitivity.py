"""How much the model's predictions depend on each Linear's output: what makes errors of different layers comparable.

For a small change dy of a Linear's output y, KL(model || changed model) is 1/2 dy^T F dy with F the Fisher information
E[g g^T] of the output; g is the gradient of -log p(token) for tokens drawn from the model's own predictions. F is
taken as diagonal and independent of the input, as in K-FAC (Martens and Grosse 2015). With dy = dW x this gives
KL ~ 1/2 sum_n E[g_n^2] (dW H dW^T)_nn, H = E[x x^T]: an error in nats per token whatever the layer.
Tokens are taken as independent. Attention averages values over tokens, where errors that tokens share do not cancel:
value projections of models that attend widely are underestimated, which measuring layers (measure.py) corrects.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quantkit.errors import StatsError
from quantkit.models.gradients import BackwardPass
from quantkit.models.stream import ModelStream
from quantkit.progress import track
from quantkit.storage.resume import passing_workspace

_TOKENS = 8192  # gradients are averaged over all channels' tokens: more text hardly moves them


def output_sensitivity(stream: ModelStream, linears: Mapping[str, nn.Module], windows: Tensor) -> dict[str, Tensor]:
    """E[g_n^2] [N] fp64 on the CPU of every given Linear's output channels, per token.

    One block is in memory at a time: forwards, its inputs kept in a file, and backwards again.
    windows: [n, seq_len] token ids; the first ones, up to 8192 tokens, are used. Deterministic.
    Raises StatsError where the gradients hold NaN or Inf.
    """
    sums = {name: torch.zeros((), dtype=torch.float64) for name in linears}
    used = windows[: max(1, _TOKENS // windows.shape[1])]
    blocks = len(stream.blocks)

    def take(name: str, _window: int, gradient: Tensor) -> None:
        sums[name] = sums[name] + gradient.square().sum(dim=0, dtype=torch.float64).cpu()

    with passing_workspace({}) as work:
        run = BackwardPass(stream, used, work, 0)
        inputs = run.run_forwards(blocks)
        gradients = work.state(blocks + 1, tuple(inputs[0].hidden.shape), inputs[0].dtype)
        run.head_gradients(inputs.pop(), gradients)
        for index in track(reversed(range(blocks)), "gradients, backwards", total=blocks):
            own = {name: module for name, module in linears.items() if stream.owner(name) == stream.blocks[index][0]}
            run.block_gradients(index, inputs.pop(), gradients, gradients, (own, take))
    for name, total in sums.items():
        if total.ndim != 1 or not bool(total.isfinite().all()):
            raise StatsError(f"{name}: the gradient of its output is not finite; its sensitivity is undefined")
    return {name: total / used.numel() for name, total in sums.items()}


def quadratic_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Mean squared output error per channel, (dW H dW^T)_nn [N] fp64; difference: [N, K], hessian: [K, K]."""
    return ((difference @ hessian) * difference).sum(dim=-1, dtype=torch.float64).clamp_min(0)
