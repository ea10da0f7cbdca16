"""Several processes that share one job: ranks, as torchrun and ``accelerate launch`` start them on one machine.

Each GPU has one. Results do not depend on how many there are: every sum is taken by one rank, over all windows, in
their order; what the ranks share out is which windows run through a block, and which rank takes which sum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.errors import DeviceError, QuantkitError, refusing

if TYPE_CHECKING:  # torch takes seconds, and every command asks whether it is one of several processes
    from torch import Tensor

_PATIENCE = timedelta(hours=2)  # a rank waits while another solves, which takes long on a CPU

Value = TypeVar("Value")


def is_first_rank() -> bool:
    """Whether this is the first of the processes it was started with, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def rank_count() -> int:
    """How many processes this one was started with, itself included."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Ranks:
    """number: of this process among ``count``. tensors: the process group of its GPU's tensors, None for the CPU's."""

    number: int = 0
    count: int = 1
    tensors: Any = field(default=None, compare=False)

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.number == 0

    def own(self, items: int) -> range:
        """The numbers, of so many items, that are this rank's."""
        return range(self.number, items, self.count)

    def collect(self, value: Value) -> list[Value]:
        """Every rank's value, in order of ranks; all wait for all."""
        if self.count == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def lead(self, call: Callable[[], Value]) -> Value:
        """What the call gives on the first rank, or the QuantkitError that it raises there, on all ranks."""
        if self.count == 1:
            return call()
        from torch import distributed

        answer: list[Any] = [None]
        if self.leads:
            try:
                answer = [call()]
            except QuantkitError as error:
                answer = [error]
        distributed.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], QuantkitError):
            answer[0].told = not self.leads
            raise answer[0]
        value: Value = answer[0]
        return value

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's tensor of one shape and dtype, on the device that this one's is on, in order of ranks."""
        import torch
        from torch import distributed

        parts = [torch.empty_like(values) for _ in range(self.count)]
        distributed.all_gather(parts, values, group=self.tensors)
        return parts


ALONE = Ranks()


@contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, str]]:
    """While entered, this process is one of the ranks it was started with; (they, the device of this one).

    device: "cpu", or "cuda" for a GPU each. Raises DeviceError where that cannot be.
    """
    if rank_count() == 1:
        yield ALONE, device
        return
    import torch
    from torch import distributed

    if os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]) != os.environ["WORLD_SIZE"]:
        raise DeviceError("ranks on several machines are not supported; start all of them on one")
    if device not in ("cpu", "cuda"):
        raise DeviceError(f"`device` {device}: each rank takes a GPU of its own; give cuda, or cpu")
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise DeviceError(f"{rank_count()} ranks, {torch.cuda.device_count()} GPUs; start a rank for each GPU")
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    with refusing("ranks cannot find each other; start them with torchrun or accelerate launch", DeviceError):
        distributed.init_process_group("gloo", timeout=_PATIENCE)
    try:
        tensors = distributed.new_group(backend="nccl") if device != "cpu" else None
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), tensors), device
    finally:
        distributed.destroy_process_group()


class Loads:
    """Which rank does which piece of work: the heaviest first, each to the rank that has the least to do."""

    def __init__(self, ranks: Ranks):
        self._todo = [0.0] * ranks.count

    def assign(self, costs: dict[str, float]) -> dict[str, int]:
        """A rank for each piece by name; the same on every rank where the costs are."""
        chosen: dict[str, int] = {}
        for name in sorted(costs, key=lambda name: -costs[name]):
            least = min(range(len(self._todo)), key=self._todo.__getitem__)
            self._todo[least] += costs[name]
            chosen[name] = least
        return chosen
