from pathlib import Path

import pytest
import torch

from quantkit.bench.kernels import LinearBench, random_linear, read_bytes, run_linear
from quantkit.bench.methods import METHOD_NAMES, method_spec
from quantkit.bench.report import check_plot_path, environment, plot_linear
from quantkit.bench.shapes import LinearShape, parse_shapes
from quantkit.errors import BenchError
from quantkit.formats.bcq import ROW_WISE, BcqSpec
from quantkit.formats.table import stored_bytes
from quantkit.nn.quantized_linear import QuantizedLinear

CPU = torch.device("cpu")


def test_method_names_are_specs() -> None:
    assert method_spec("bcq-w4-g128") == BcqSpec(4, 128, offset=True)
    assert method_spec("bcq-w3-g64-s8") == BcqSpec(3, 64, offset=True, scale_bits=8)
    assert method_spec("nuqmm-q2-grow") == BcqSpec(2, ROW_WISE, offset=False)
    for form in METHOD_NAMES:
        method_spec(form.example)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gptq-4", "known forms: bcq-w4-g128"), ("bcq-w9-g128", "choose 1 to 8"), ("bcq-w4-g12", "multiple of 8")],
    ids=["unknown", "bits", "group"],
)
def test_bad_methods_are_one_line(name: str, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        method_spec(name)


def test_cpu_bench_reports_every_combination_and_says_reference() -> None:
    bench = LinearBench(parse_shapes("48x72,32x64"), ["bcq-w2-g32", "nuqmm-q1-grow"], [1, 3], CPU)
    results = list(run_linear(bench))
    assert [(r.shape, r.method, r.tokens) for r in results] == [
        (shape, method, tokens)
        for shape in ("48x72", "32x64")
        for method in ("bcq-w2-g32", "nuqmm-q1-grow")
        for tokens in (1, 3)
    ]
    first = results[0]
    assert first.implementation == "reference"
    assert first.baseline == "float32"
    groups = 3  # 72 columns in groups of 32
    assert first.bytes == 2 * 48 * 9 + 3 * 48 * groups * 2 + (72 + 48) * 4
    assert first.peak_percent is None
    assert all(r.error < 1e-5 and r.median_us > 0 for r in results)


def test_of_equal_steps_one_scale_a_group_is_read() -> None:
    spec, n, k = method_spec("rtn-w8-g128"), 32, 512
    module = random_linear(spec, LinearShape("s", n, k), CPU, torch.float32, equal_steps=True)
    stored = stored_bytes(spec, (n, k))
    assert read_bytes(module, stored) == stored
    module.layout = "batch"
    module.prepare()
    assert read_bytes(module, stored) == n * k + 2 * n * (k // 128) * 2  # a step and an offset, fp16


def test_wrong_product_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, x: x.new_ones(x.shape[0], self.out_features))
    with pytest.raises(BenchError, match=r"bcq-w2-g32 at 48x72, 1 tokens: relative error"):
        list(run_linear(LinearBench(parse_shapes("48x72"), ["bcq-w2-g32"], [1], CPU)))


def test_energy_on_the_cpu_is_refused() -> None:
    with pytest.raises(BenchError, match="use `device` cuda"):
        list(run_linear(LinearBench(parse_shapes("16x64"), ["bcq-w2-g32"], [1], CPU, energy=True)))


def test_environment_names_versions_and_commit() -> None:
    facts = environment(CPU)
    assert {"device", "torch", "cupy", "quantkit", "commit"} <= set(facts)
    assert facts["torch"] == torch.__version__


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = list(run_linear(LinearBench(parse_shapes("16x64,32x64"), ["bcq-w2-g32"], [1], CPU)))
    plot_linear(tmp_path / "plot.png", results, "cpu", 1e9)
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("path", ["plot.pdf", "absent/plot.png"])
def test_bad_plot_paths_are_refused_first(path: str) -> None:
    with pytest.raises(BenchError, match="`plot`"):
        check_plot_path(Path(path))


@pytest.mark.cuda
def test_gpu_bench_names_the_kernel_and_stays_below_the_peak() -> None:
    cuda = torch.device("cuda")
    (result,) = run_linear(LinearBench([LinearShape("s", 4096, 4096)], ["bcq-w4-g128"], [1], cuda))
    assert result.implementation.startswith("bcq_")
    assert result.peak_percent is None or 0 < result.peak_percent <= 100


@pytest.mark.parametrize("method", ["bcq-w4-g64", "bcq-w3-g64-s8", "nuqmm-q4-g64"])
def test_random_weights_have_no_mean_that_would_grow_from_block_to_block(method: str) -> None:
    weight = random_linear(method_spec(method), LinearShape("s", 128, 256), CPU, torch.float32).dequantize()
    assert 0.01 < weight.std() < 0.03
    assert weight.mean().abs() < 0.1 * weight.std()  # 32768 weights, 512 offsets: 0.02 is usual


def test_random_linear_has_the_requested_shape() -> None:
    module = random_linear(BcqSpec(2, 32, offset=True), LinearShape("s", 20, 50), CPU, torch.float32)
    assert module(torch.ones(1, 50)).shape == (1, 20)
