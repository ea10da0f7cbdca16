from collections.abc import Callable

import pytest
import torch

from quantkit.bench import memory, shapes
from quantkit.bench.decode import DecodeBench, run_decode, shaped_model
from quantkit.bench.kernels import LinearBench, run_linear
from quantkit.bench.memory import check_fits, model_bytes
from quantkit.bench.prefill import PrefillBench, prefill_model, run_prefill
from quantkit.bench.shapes import LinearShape, ModelShape
from quantkit.errors import BenchError
from quantkit.formats.bcq import BcqSpec
from quantkit.formats.table import stored_bytes

CPU = torch.device("cpu")
TINY = ModelShape("llama", layers=3, hidden=64, ffn=96, heads=4, kv_heads=2, vocabulary=100)


def _bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with the bytes that are to be free."""
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    return lambda free: monkeypatch.setattr(memory, "free_bytes", lambda device: free)


def test_bytes_are_those_of_the_models_that_are_made() -> None:
    assert model_bytes(TINY, torch.float32) == _bytes(shaped_model(TINY, CPU))
    spec = BcqSpec(2, 32, offset=True)
    packed = model_bytes(TINY, torch.float32, lambda _index, *size: stored_bytes(spec, size))
    block = _bytes(shaped_model(TINY, CPU).model.layers[0])
    assert packed == _bytes(shaped_model(TINY, CPU, spec)) + block


def test_what_does_not_fit_is_refused_before_anything_is_made(
    small_machine: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_machine(100_000)
    made = (
        "quantkit.bench.decode.shaped_model",
        "quantkit.bench.prefill.prefill_model",
        "quantkit.bench.kernels.measure",
    )
    for name in made:
        monkeypatch.delattr(name)
    rows, lengths = (1,), (4,)
    with pytest.raises(BenchError, match=r"tiny, bcq-w2-g32: needs about 0\.\d GB .* 0\.0 GB free; choose"):
        list(run_decode(DecodeBench("tiny", "bcq-w2-g32", 4, 4, CPU)))
    with pytest.raises(BenchError, match="tiny, fp16, 4 tokens: needs about"):
        list(run_prefill(PrefillBench("tiny", ("fp16",), rows, lengths, CPU)))
    with pytest.raises(BenchError, match="512x512: needs about"):
        list(run_linear(LinearBench([LinearShape("512x512", 512, 512)], ["bcq-w2-g32"], rows, CPU)))


def test_floating_point_is_left_out_where_only_the_packed_model_fits(small_machine: Callable[[int], None]) -> None:
    small_machine(int(1.2 * model_bytes(TINY, torch.float32, lambda *_: 0)) + 40_000)
    results = run_decode(DecodeBench("tiny", "bcq-w2-g32", 4, 4, CPU))
    assert [result.method for result in results] == ["bcq-w2-g32"]


def test_activations_of_a_long_pass_count(small_machine: Callable[[int], None]) -> None:
    small_machine(10 * _bytes(prefill_model("tiny", TINY, "flatten-o1", CPU)))
    assert len(list(run_prefill(PrefillBench("tiny", ("flatten-o1",), (1,), (8,), CPU, timed=False)))) == 1
    with pytest.raises(BenchError, match="tiny, flatten-o1, 80000 tokens: needs about"):
        list(run_prefill(PrefillBench("tiny", ("flatten-o1",), (1, 20), (8, 4000), CPU)))


def test_one_byte_too_many_is_too_many(small_machine: Callable[[int], None]) -> None:
    small_machine(1150)
    check_fits("x", 1000, CPU)
    with pytest.raises(BenchError):
        check_fits("x", 1001, CPU)
