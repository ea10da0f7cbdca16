"""The bench of experts: what it reports, and that wrong products are not timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantkit.bench import experts
from quantkit.bench.experts import ExpertsBench, run_experts
from quantkit.bench.shapes import ExpertsShape, experts_shapes
from quantkit.errors import BenchError

CPU = torch.device("cpu")
SHAPE = ExpertsShape("tiny", experts=4, top_k=2, out_features=32, in_features=64, shared_input=True)


def test_every_shape_method_and_number_of_tokens_is_a_row() -> None:
    shapes = [SHAPE, replace(SHAPE, name="own inputs", shared_input=False)]
    results = list(run_experts(ExpertsBench(shapes, ["bcq-w2-g32", "nuqmm-q1-g64"], [1, 3], CPU)))
    assert [(r.shape, r.method, r.tokens) for r in results] == [
        (shape.name, method, tokens)
        for shape in shapes
        for method in ("bcq-w2-g32", "nuqmm-q1-g64")
        for tokens in (1, 3)
    ]
    first, own = results[0], results[4]
    weight = 2 * 32 * 8 + 3 * 32 * 2 * 2  # signs, scales and offsets
    assert first.active == 2  # one token takes two different experts
    assert first.bytes == 2 * weight + (64 + 2 * 32) * 4
    assert own.bytes == 2 * weight + (2 * 64 + 2 * 32) * 4
    assert first.implementation == "reference"
    assert first.baseline_us is None
    assert all(r.error < 1e-5 and r.median_us > 0 for r in results)


def test_wrong_product_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "bcq_experts", lambda x, chosen, *_, **__: x.new_ones(len(chosen), 32))
    with pytest.raises(BenchError, match="bcq-w2-g32 at tiny, 1 tokens: relative error"):
        list(run_experts(ExpertsBench([SHAPE], ["bcq-w2-g32"], [1], CPU)))


def test_other_formats_and_unknown_models_are_refused() -> None:
    with pytest.raises(BenchError, match="bcq format only"):
        list(run_experts(ExpertsBench([SHAPE], ["bipolar-w2a2"], [1], CPU)))
    with pytest.raises(BenchError, match="mixtral-8x7b"):
        experts_shapes("mixtral")


def test_shapes_are_those_of_the_models() -> None:
    gate_up, down = experts_shapes("qwen3-30b-a3b")
    assert (gate_up.out_features, gate_up.in_features, gate_up.shared_input) == (1536, 2048, True)
    assert (down.out_features, down.in_features, down.shared_input) == (2048, 768, False)
