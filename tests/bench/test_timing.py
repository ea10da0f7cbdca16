import time

import pytest
import torch

from quantkit.bench.timing import check_peak, check_result, measure, rotation_length
from quantkit.cuda.graph import FilledScalars
from quantkit.errors import BenchError

CPU = torch.device("cpu")


def test_cpu_calls_are_repeated_in_turn_and_ordered_by_percentile() -> None:
    seen: list[int] = []
    timing = measure([lambda: seen.append(0), lambda: seen.append(1)], CPU)
    assert timing.repeats == 100
    assert abs(seen.count(0) - seen.count(1)) <= 2
    assert 0 < timing.p10 <= timing.median <= timing.p90


def test_slow_calls_stop_after_a_second() -> None:
    timing = measure([lambda: time.sleep(0.3)], CPU)
    assert timing.repeats < 10
    assert timing.median >= 0.3


def test_bandwidth_above_the_peak_is_refused() -> None:
    check_peak("x", 4.6e12, 4.65e12)
    check_peak("x", 9e12, None)
    with pytest.raises(BenchError, match=r"x: 4700 GB/s is above this GPU's 4650 GB/s"):
        check_peak("x", 4.7e12, 4.65e12)


@pytest.mark.parametrize("error", [0.02, float("nan"), float("inf")])
def test_wrong_results_are_refused(error: float) -> None:
    with pytest.raises(BenchError, match="relative error"):
        check_result("x", error, 1e-2)


def test_one_input_set_is_enough_without_a_gpu() -> None:
    assert rotation_length(1, CPU) == 1


@pytest.mark.cuda
def test_rotation_exceeds_the_cache_and_graph_times_agree_with_traffic() -> None:
    device = torch.device("cuda")
    size = 64 << 20
    buffers = [torch.ones(size // 4, device=device) for _ in range(rotation_length(size, device))]
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    assert len(buffers) * size >= 8 * l2
    timing = measure([buffer.sum for buffer in buffers], device)
    assert 1e9 < size / timing.median < 2e13


def test_numbers_become_fills() -> None:
    """A fill can be captured in a graph, a copy from the host cannot; everything else is left alone."""
    with FilledScalars():
        assert torch.equal(torch.tensor(0.5, dtype=torch.float16), torch.full((), 0.5, dtype=torch.float16))
        assert torch.tensor(3).dtype == torch.int64
        assert torch.tensor([1.0, 2.0]).shape == (2,)
