"""What a folder holds is recognised, the rest left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import EvaluationError
from quantkit.report.sources import find_sources
from tests.pipeline import quantize_tiny
from tests.report import documents


def test_every_kind_is_found_in_a_folder_and_the_folders_in_it(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "q4")
    documents.write(tmp_path / "q4" / "divergence.json", documents.divergence_document())
    documents.write(tmp_path / "plan.json", documents.search_document())
    documents.write(tmp_path / "c.json", documents.comparison_document())
    documents.write(tmp_path / "p.json", documents.perplexity_document())
    documents.write(tmp_path / "q.json", documents.quality_document())
    documents.write(tmp_path / "other.json", {"kind": "unknown"})
    documents.write(tmp_path / "list.json", [1, 2])
    found = find_sources(tmp_path)
    names = [found.searches, found.checkpoints, found.divergences, found.perplexities, found.comparisons]
    assert [list(kind) for kind in names] == [["plan.json"], ["q4"], ["q4/divergence.json"], ["p.json"], ["c.json"]]
    assert list(found.tables) == ["q.json"]
    assert list(find_sources(tmp_path / "q4").checkpoints) == ["q4"]


def test_a_plan_brings_its_document(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("schema: 1")
    documents.write(tmp_path / "plan.json", documents.search_document())
    documents.write(tmp_path / "d.json", documents.divergence_document())
    found = find_sources(tmp_path / "plan.yaml")
    assert list(found.searches) == ["plan.json"]
    assert not found.divergences


def test_nothing_to_show_is_refused(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no such file or folder"):
        find_sources(tmp_path / "none")
    with pytest.raises(EvaluationError, match="holds no checkpoint, plan or measurement"):
        find_sources(tiny_model("opt"))
    (tmp_path / "plan.yaml").write_text("schema: 1")
    with pytest.raises(EvaluationError, match=r"plan\.json is not beside it"):
        find_sources(tmp_path / "plan.yaml")
    documents.write(tmp_path / "plan.json", documents.divergence_document())
    with pytest.raises(EvaluationError, match="not written by quantkit search"):
        find_sources(tmp_path / "plan.yaml")
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(EvaluationError, match="cannot be read"):
        find_sources(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("search", {"layers": {}}, "it.layers is {}"),
        ("search", {"budget": {"kind": "bpw", "limit": True}}, "it.budget.limit is True, not a number"),
        ("search", {"uniform": [{"label": "", "bits_per_weight": 1, "predicted_kl": 1}]}, "label is '', not a word"),
        ("comparison", {"rows": []}, "it.rows is"),
        ("comparison", {"device": None}, "it.device is None"),
        ("divergence", {"histogram": {"edges": [1, 2, 3], "counts": [1]}}, "one edge more than counts"),
        ("divergence", {"mean_kl": float("nan")}, "it.mean_kl is nan, not a number"),
        ("perplexity", {"tokens": "many"}, "it.tokens is 'many'"),
    ],
    ids=["layers", "limit", "label", "rows", "device", "histogram", "nan", "tokens"],
)
def test_malformed_results_are_refused_before_anything_is_drawn(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    document = getattr(documents, f"{kind}_document")() | change
    documents.write(tmp_path / "a.json", document)
    with pytest.raises(EvaluationError, match=f"a.json is malformed .*{message}"):
        find_sources(tmp_path)


def test_rows_that_were_scored_on_other_tasks_are_refused(tmp_path: Path) -> None:
    document = documents.comparison_document()
    document["rows"][1]["scores"] = []
    documents.write(tmp_path / "a.json", document)
    with pytest.raises(EvaluationError, match="have not all been scored on the same tasks"):
        find_sources(tmp_path)
