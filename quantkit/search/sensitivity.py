"""How much the model's predictions depend on each Linear's output: what makes errors of different layers comparable.

For a small change dy of a Linear's output y, KL(model || changed model) is 1/2 dy^T F dy with F the Fisher information
E[g g^T] of the output; g is the gradient of -log p(token) for tokens drawn from the model's own predictions. F is
taken as diagonal and independent of the input, as in K-FAC (Martens and Grosse 2015). With dy = dW x this gives
KL ~ 1/2 sum_n E[g_n^2] (dW H dW^T)_nn, H = E[x x^T]: an error in nats per token whatever the layer.
Tokens are taken as independent. Attention averages values over tokens, where errors that tokens share do not cancel:
value projections of models that attend widely are underestimated, which measuring layers (measure.py) corrects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.errors import StatsError
from quantkit.progress import track

_TOKENS = 8192  # gradients are averaged over all channels' tokens: more text hardly moves them
_SEED = 0


def output_sensitivity(model: Any, linears: Mapping[str, nn.Module], windows: Tensor) -> dict[str, Tensor]:
    """E[g_n^2] [N] fp64 on the CPU of every given Linear's output channels, per token.

    windows: [n, seq_len] token ids; the first ones, up to 8192 tokens, are used. Deterministic.
    Raises StatsError where the gradients hold NaN or Inf.
    """
    sums = {name: torch.zeros((), dtype=torch.float64) for name in linears}
    count = max(1, _TOKENS // windows.shape[1])
    used = windows[:count]
    generator = torch.Generator().manual_seed(_SEED)
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with ExitStack() as hooks:
        handle = model.get_input_embeddings().register_forward_hook(_start_of_graph)
        hooks.callback(handle.remove)
        for name, module in linears.items():
            hooks.callback(module.register_forward_hook(_watch(name, sums)).remove)
        for window in track(used.split(1), "sensitivity", total=len(used)):
            _sampled_loss(model, window, generator).backward()
    for parameter in frozen:
        parameter.requires_grad_(True)
    for name, total in sums.items():
        if total.ndim != 1 or not bool(total.isfinite().all()):
            raise StatsError(f"{name}: the gradient of its output is not finite; its sensitivity is undefined")
    return {name: total / used.numel() for name, total in sums.items()}


def quadratic_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """Mean squared output error per channel, (dW H dW^T)_nn [N] fp64; difference: [N, K], hessian: [K, K]."""
    return ((difference @ hessian) * difference).sum(dim=-1, dtype=torch.float64).clamp_min(0)


def _sampled_loss(model: Any, window: Tensor, generator: torch.Generator) -> Tensor:
    """Summed -log p of one token drawn after every position of the window [1, seq_len]."""
    device = next(model.parameters()).device
    logits = model(window.to(device, torch.long), use_cache=False).logits[0].float()
    drawn = torch.multinomial(logits.detach().softmax(dim=-1).cpu(), 1, generator=generator)[:, 0]
    return torch.nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")


def _start_of_graph(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)


def _watch(name: str, sums: dict[str, Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
    def accumulate(gradient: Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        sums[name] = sums[name] + rows.square().sum(dim=0, dtype=torch.float64).cpu()

    def watch(_module: nn.Module, _arguments: Any, output: Tensor) -> None:
        output.register_hook(accumulate)

    return watch
