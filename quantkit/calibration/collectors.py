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
    """Accumulates the LayerStats of one input x [tokens, K] of a Linear that is run on every token.

    Sums run in fp32 within an update and in fp64 across updates. Everything stays on x's device.
    positions: rows of the whole run to sample, rising, as sample_positions gives them.
    """

    def __init__(self, name: str, columns: int, positions: Tensor, device: torch.device):
        self._name, self._columns, self._positions, self._tokens = name, columns, positions, 0
        self._absmax = torch.zeros(columns, device=device)
        self._sum_abs = torch.zeros(columns, dtype=torch.float64, device=device)
        self._sum_square = torch.zeros(columns, dtype=torch.float64, device=device)
        self._histogram = torch.zeros(HISTOGRAM_BINS, dtype=torch.int64, device=device)
        self._sample = torch.zeros(len(positions), columns, device=device)
        self._vocabulary_absmax = torch.zeros(columns, device=device)

    def update(self, x: Tensor) -> None:
        """Take in the next rows x [rows, K] of any float type.

        Raises StatsError, naming the layer, for NaN or Inf.
        """
        x = x.float()
        magnitude = x.abs()
        torch.maximum(self._absmax, self._largest(magnitude), out=self._absmax)
        self._sum_abs += magnitude.sum(dim=0)
        self._sum_square += x.square().sum(dim=0)
        self._histogram += magnitude_histogram(x)
        self._keep_rows(x)
        self._tokens += x.shape[0]

    def reach(self, x: Tensor) -> None:
        """Take in rows that are no text, for how far x may reach alone.

        Raises StatsError, naming the layer, for NaN or Inf.
        """
        if x.shape[0]:
            torch.maximum(self._vocabulary_absmax, self._largest(x.float().abs()), out=self._vocabulary_absmax)

    def _largest(self, magnitude: Tensor) -> Tensor:
        absmax = magnitude.amax(dim=0)
        if not bool(absmax.isfinite().all()):
            raise StatsError(f"{self._name}: its input holds NaN or Inf; the model overflows on this text")
        return absmax

    def _keep_rows(self, x: Tensor) -> None:
        low, high = torch.searchsorted(
            self._positions, torch.tensor([self._tokens, self._tokens + x.shape[0]])
        ).tolist()
        self._sample[low:high] = x[(self._positions[low:high] - self._tokens).to(x.device)]

    def result(self, tokens: int) -> LayerStats:
        """The statistics, on the CPU.

        Raises StatsError unless exactly ``tokens`` rows were seen.
        """
        if self._tokens != tokens:
            raise StatsError(
                f"{self._name}: saw {self._tokens} of {tokens} tokens; its blocks do not run on every token"
            )
        return self._result()

    def _result(self) -> LayerStats:
        count = max(self._tokens, 1)
        return LayerStats(
            absmax=self._absmax.cpu(),
            mean_abs=(self._sum_abs / count).float().cpu(),
            mean_square=(self._sum_square / count).float().cpu(),
            histogram=self._histogram.cpu(),
            sample=self._sample.cpu(),
            tokens=self._tokens,
            vocabulary_absmax=self._vocabulary_absmax.cpu(),
        )


class RoutedCollector(Collector):
    """The same for a Linear of an expert, which is run on the tokens routed to it; how many is not known before.

    The sample is drawn by a random key for each row, of which the rows of the smallest stay.
    seed: of the keys.
    """

    def __init__(self, name: str, columns: int, seed: int, device: torch.device):
        super().__init__(name, columns, torch.empty(0, dtype=torch.int64), device)
        self._generator = torch.Generator().manual_seed(seed)
        self._keys = torch.empty(0, dtype=torch.float64)

    def _keep_rows(self, x: Tensor) -> None:
        keys = torch.cat([self._keys, torch.rand(len(x), dtype=torch.float64, generator=self._generator)])
        chosen = keys.argsort(stable=True)[:SAMPLE_ROWS].sort().values
        self._keys = keys[chosen]
        self._sample = torch.cat([self._sample, x])[chosen.to(x.device)]

    def result(self, tokens: int) -> LayerStats:
        """The statistics of the rows that came, at most ``tokens``, on the CPU; zeros where none did."""
        return self._result()
