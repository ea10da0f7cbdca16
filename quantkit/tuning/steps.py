"""The steps of a tuning: Adam with a rate of its own per tensor.

On a GPU a step of a small block, or of a small model, is many short kernels, and the host takes longer to start them
than they run. So a step that never waits for the host is captured in a CUDA graph: the first step runs as it is, the
second shows whether it waits, all further ones are replayed. Of a step that waits, all but the model's own passes is.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.cuda.graph import FilledScalars, capture
from quantkit.tuning.part import TunedPart, expanded_once, holding, pass_on
from quantkit.tuning.settings import TuneSettings

CPU = torch.device("cpu")
_BETAS = (0.9, 0.99)
_WARM_UP = 0.05  # share of all steps
_WAITING = "synchronizing CUDA operation"  # of torch's warning
_SMALLEST_RATE = 1e-8  # so that a tensor of zeros can move

Loss = Callable[[Tensor], Tensor]
"""Window numbers [b] -> their mean loss, with a graph where gradients are on."""


@dataclass(frozen=True)
class Objective:
    """What is lowered. windows: how many there are. at_once: windows whose graph is held at a time.

    dtype: what is not quantized is stored in: the held-out loss is that of the stored values. of: what is tuned, for
    messages. shown: whether stderr shows how far a pass is and what it leaves. device: where the loss takes the
    numbers of windows; on a GPU it must read everything there by them, as a captured step gets other numbers in the
    same place.
    """

    loss: Loss
    windows: int
    at_once: int
    dtype: torch.dtype
    of: str = "quantized model"
    shown: bool = True
    device: torch.device = CPU


class Steps:
    """Steps of Adam on the parts and the other parameters, in place; rates rise shortly and fall to 0 at ``count``."""

    def __init__(
        self,
        parts: Sequence[TunedPart],
        others: Sequence[nn.Parameter],
        objective: Objective,
        settings: TuneSettings,
        count: int,
    ):
        self._count, self._taken = count, 0
        groups = _groups(parts, others, settings)
        self._rates = torch.tensor([group["lr"] for group in groups], dtype=torch.float64)
        on_gpu = objective.device.type == "cuda"
        if on_gpu:
            self._rates = self._rates.to(objective.device, torch.float32)
            self._now = self._rates.clone()
            for group, rate in zip(groups, self._now, strict=True):
                group["lr"] = rate
        self._optimizer = torch.optim.Adam(groups, betas=_BETAS, fused=True, capturable=on_gpu)
        self._step = _Step(parts, others, objective, self._optimizer)
        self._captured = _Captured(self._step, settings.batch) if on_gpu else None

    def take(self, batch: Tensor) -> None:
        """One step on the mean loss of the windows of these numbers."""
        share = _share(self._taken, self._count)
        self._taken += 1
        if self._captured is None:
            for group, rate in zip(self._optimizer.param_groups, self._rates.tolist(), strict=True):
                group["lr"] = rate * share
            self._step.take(batch)
            return
        torch.mul(self._rates, share, out=self._now)
        self._captured.take(batch)


@dataclass(frozen=True)
class _Step:
    """What a step works on, and the step as it is without a graph."""

    parts: Sequence[TunedPart]
    others: Sequence[nn.Parameter]
    objective: Objective
    optimizer: torch.optim.Optimizer

    def take(self, batch: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with expanded_once(self.parts):
            self.backward(batch)
        self.optimizer.step()

    def backward(self, batch: Tensor) -> None:
        """The gradients of the batch's loss, window by window."""
        for part in batch.split(self.objective.at_once):
            (self.objective.loss(part) * (len(part) / len(batch))).backward()


class _Captured:
    """Steps on a GPU: full batches in a CUDA graph where they never wait for the host, else what can be of each."""

    def __init__(self, step: _Step, batch: int):
        self._step = step
        self._numbers = torch.zeros(batch, dtype=torch.int64, device=step.objective.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._update: _Update | None = None
        self._taken, self._waits = 0, False

    def take(self, batch: Tensor) -> None:
        """One step on the windows of these numbers, on the GPU."""
        if self._waits:
            self._update = self._update or _Update(self._step)
            self._update.take(batch)
            return
        if len(batch) != len(self._numbers):
            self._step.take(batch)
            return
        self._numbers.copy_(batch)
        self._taken += 1
        if self._taken == 1:  # makes Adam's moments, loads kernels
            self._step.take(self._numbers)
        elif self._taken == 2:
            self._waits = _waits(lambda: self._step.take(self._numbers))
        else:
            if self._graph is None:
                torch.cuda.empty_cache()  # the graph has memory of its own
                self._graph = capture([lambda: self._step.take(self._numbers)], self._numbers.device, warm_up=[])
            self._graph.replay()


class _Update:
    """Steps that wait, with all but the model's own passes in a CUDA graph.

    Most of such a step went to expanding weights one by one: of experts these are many and small.
    """

    def __init__(self, step: _Step):
        self._step = step
        biases = [part.bias for part in step.parts if part.bias is not None]
        self._held = [part.expanded().detach().requires_grad_() for part in step.parts]
        self._gathered = [*self._held, *step.others, *biases]  # gradients of the model's passes, always in one place
        for each in self._gathered:
            each.grad = torch.zeros_like(each)
        torch.cuda.empty_cache()  # the graph has memory of its own
        self._graph = capture([self._behind_passes], step.objective.device, warm_up=[])

    def take(self, batch: Tensor) -> None:
        """One step on the windows of these numbers, on the GPU."""
        with holding(self._step.parts, self._held):
            self._step.backward(batch)
        self._graph.replay()

    def _behind_passes(self) -> None:
        for part, held in zip(self._step.parts, self._held, strict=True):
            for value in part.values:
                value.grad = None
            pass_on(part.expanded(), held)  # one by one, so that no second copy of all weights is held
        self._step.optimizer.step()
        with torch.no_grad():
            for part, held in zip(self._step.parts, self._held, strict=True):
                held.copy_(part.expanded())
            for each in self._gathered:
                assert each.grad is not None
                each.grad.zero_()


def _waits(step: Callable[[], None]) -> bool:
    """Take a step; whether it makes the host wait for the GPU, as experts do that ask how many tokens they have.

    torch warns in whichever thread waits. Others do as well: what is finished is saved, and what comes next is read.
    """
    before, own, shown, found = torch.cuda.get_sync_debug_mode(), threading.get_ident(), warnings.showwarning, []

    def note(message: Warning | str, *where: Any, **more: Any) -> None:
        if _WAITING not in str(message):
            shown(message, *where, **more)
        elif threading.get_ident() == own:
            found.append(message)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_WAITING}")
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")  # once a process
        warnings.showwarning = note  # given back with the filters
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with FilledScalars():  # as capture enters it
                step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return bool(found)


def _share(step: int, steps: int) -> float:
    """Of the first rate: a short rise, then half a cosine down to 0."""
    warm_up = max(1, round(steps * _WARM_UP))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _groups(parts: Sequence[TunedPart], others: Sequence[nn.Parameter], settings: TuneSettings) -> list[dict[str, Any]]:
    """One group of the optimizer per tensor: its rate follows its size."""
    groups = []
    tensors = [(parameter, settings.rate) for parameter in others]
    for part in parts:
        for name, parameter in part.named_parameters():
            tensors.append((parameter, settings.code_rate if name == "latent" else settings.rate))
    for parameter, rate in tensors:
        size = parameter.detach().square().mean().sqrt().item()
        groups.append({"params": [parameter], "lr": max(rate * size, _SMALLEST_RATE)})
    return groups
