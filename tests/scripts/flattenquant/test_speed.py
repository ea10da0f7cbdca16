"""scripts/flattenquant/speed.py: the bytes it counts, and the tables it makes of a run."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.flattenquant import speed

METHODS = ("flatten-o1", "flatten-o3")
FACTS = dict.fromkeys(("device", "driver", "cuda", "torch", "cupy", "python", "commit"), "x")


def _prefill(method: str, ms: float | None) -> dict[str, Any]:
    row = {"model": "opt-13b", "method": method, "batch": 8, "length": 2048, "ms": ms}
    peak = {"fp16": 20_000_000_000, "flatten-o3": 9_000_000_000}.get(method)
    return row | {"tokens_per_second": 1e3, "tera_ops": 800.0, "peak_memory_bytes": peak}


def test_weights_are_counted_as_stored() -> None:
    parameters = 12 * 5120**2
    assert speed.weight_bytes("opt-13b", "fp16", 40) == 2 * 40 * parameters
    assert speed.weight_bytes("opt-13b", "smoothquant", 1) == pytest.approx(parameters, rel=0.01)
    eight, mixed = (speed.weight_bytes("opt-13b", method, 40) / parameters / 40 for method in METHODS)
    assert eight == pytest.approx(1.215, rel=0.01)  # a fifth more columns of one byte
    assert 0.6 < mixed / eight < 0.9


def test_tables_show_speed_over_fp16_and_what_does_not_fit() -> None:
    passes = [_prefill("fp16", 10.0), _prefill("smoothquant", 5.0), _prefill("flatten-o1", 8.0)]
    text = speed.markdown({"command": "run", "environment": FACTS, "prefill": [*passes, _prefill("flatten-o3", None)]})
    assert "| 8 | 2048 | 10.0 | 5.0 (2.00x) | 8.0 (1.25x) | does not fit | 1000, 800 | 9.0 (45.0% of fp16) |" in text
    assert "int8-attention" not in text
    rows = [*passes, _prefill("flatten-o3", 5.0), _prefill("flatten-o1-int8-attention", 4.0)]
    assert "| 4.0 (2.50x) |" in speed.markdown({"command": "run", "environment": FACTS, "prefill": rows})


def test_kernel_tables_have_the_papers_column() -> None:
    product = {"M": 16384, "N": 4096, "K": 4096, "data": "normal", "tera_ops": 700}
    rows = [
        {"what": "flatten_quantize", "M": 16384, "K": 4096, "extended": 1024, "us": 60.0}
        | {"gigabytes_per_second": 3600, "peak_percent": 77.0},
        {"what": "fp16", "us": 800.0, **product},
        {"what": "int8_gemm", "us": 400.0, **product, "peak_percent": 71.0},
    ]
    text = speed.markdown({"command": "run", "environment": FACTS, "kernels": rows})
    assert "| flatten_quantize | 0.060 | 0.19 |" in text
    assert "| 16384 x 4096 x 4096 | int8_gemm | 400 | 700 | 71 % | 2.00 |" in text


def test_attention_table_has_heads_and_speed_over_fp16() -> None:
    size = {"heads": 32, "kv_heads": 8, "head_dim": 128, "batch": 8, "length": 2048, "tera_ops": 500}
    rows = [{"what": "fp16", "us": 800.0, **size}, {"what": "int8", "us": 640.0, **size, "peak_percent": 65.0}]
    text = speed.markdown({"command": "run", "environment": FACTS, "attention": rows})
    assert "| 8 x 2048 | 32 x 128, 8 of K and V | int8 | 640 | 500 | 65 % | 1.25 |" in text


def test_memory_table_marks_what_is_larger_than_the_gpu() -> None:
    sizes = [(batch, length) for length in (512, 1024, 2048) for batch in (1, 8, 32)]
    rows = [
        {"model": model, "method": method, "batch": batch, "length": length, "device_bytes": 100}
        | {"peak_bytes": 120 if method == "fp16" else 60}
        for model in ("opt-30b", "opt-66b")
        for method in ("fp16", "smoothquant", "flatten-o3")
        for batch, length in sizes
    ]
    text = speed.markdown({"command": "run", "environment": FACTS, "memory": rows})
    assert "0.0, does not fit" in text
    assert "0.0 (50%)" in text
    assert "| opt-66b | fp16 | paper | 126.3 |" in text
