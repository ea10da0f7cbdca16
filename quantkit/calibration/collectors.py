"""Running statistics of the inputs of Linears, in memory that does not grow with the text."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import StatsError
from quantkit.stats import HISTOGRAM_BINS, SAMPLE_ROWS, LayerStats, magnitude_histogram


def sample_positions(tokens: int, seed: int) -> Tensor:
    """Rows to keep of a run over ``tokens`` rows: SAMPLE_ROWS of them (all, if fewer), seeded, rising, int64."""
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    return order[:SAMPLE_ROWS].sort().values


class Collector:
    """Accumulates the LayerStats of one input x [tokens, K].

    Sums run in fp32 within an update and in fp64 across updates. Everything stays on x's device.
    positions: rows of the whole run to sample, rising, as sample_positions gives them.
    """

    def __init__(self, name: str, columns: int, positions: Tensor, device: torch.device):
        self._name, self._positions, self._tokens = name, positions, 0
        self._absmax = torch.zeros(columns, device=device)
        self._sum_abs = torch.zeros(columns, dtype=torch.float64, device=device)
        self._sum_square = torch.zeros(columns, dtype=torch.float64, device=device)
        self._histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
        self._sample = torch.zeros(len(positions), columns, device=device)

    def update(self, x: Tensor) -> None:
        """Take in the next rows x [rows, K] of any float type.

        Raises StatsError, naming the layer, for NaN or Inf.
        """
        x = x.float()
        magnitude = x.abs()
        absmax = magnitude.amax(dim=0)
        if not bool(absmax.isfinite().all()):
            raise StatsError(f"{self._name}: its input holds NaN or Inf; the model overflows on this text")
        torch.maximum(self._absmax, absmax, out=self._absmax)
        self._sum_abs += magnitude.sum(dim=0)
        self._sum_square += x.square().sum(dim=0)
        self._histogram += magnitude_histogram(x)
        low, high = torch.searchsorted(
            self._positions, torch.tensor([self._tokens, self._tokens + x.shape[0]])
        ).tolist()
        self._sample[low:high] = x[(self._positions[low:high] - self._tokens).to(x.device)]
        self._tokens += x.shape[0]

    def result(self, tokens: int) -> LayerStats:
        """The statistics, on the CPU.

        Raises StatsError unless exactly ``tokens`` rows were seen.
        """
        if self._tokens != tokens:
            raise StatsError(
                f"{self._name}: saw {self._tokens} of {tokens} tokens; its blocks do not run on every token"
            )
        return LayerStats(
            absmax=self._absmax.cpu(),
            mean_abs=(self._sum_abs / tokens).float().cpu(),
            mean_square=(self._sum_square / tokens).float().cpu(),
            histogram=self._histogram.cpu(),
            sample=self._sample.cpu(),
            tokens=tokens,
        )
