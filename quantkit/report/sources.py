"""What a report is made of: plans, checkpoints and measurements found in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.summary import summarize
from quantkit.errors import EvaluationError
from quantkit.models.loading import is_quantized
from quantkit.report.checks import CHECKS
from quantkit.storage.checks import check_document
from quantkit.storage.documents import read_json

Document = Mapping[str, Any]
_KINDS = {"search": "searches", "comparison": "comparisons"}


@dataclass(frozen=True)
class Sources:
    """JSON documents by file name: plans of searches, checkpoint summaries, divergences, perplexities, comparisons, and
    tables of many recipes' perplexities."""

    searches: Mapping[str, Document]
    checkpoints: Mapping[str, Document]
    divergences: Mapping[str, Document]
    perplexities: Mapping[str, Document]
    comparisons: Mapping[str, Document]
    tables: Mapping[str, Document]

    @property
    def empty(self) -> bool:
        """Whether nothing was found."""
        kinds = (self.searches, self.checkpoints, self.divergences, self.perplexities, self.comparisons, self.tables)
        return not any(kinds)


def find_sources(path: Path) -> Sources:
    """Everything that can be shown of a plan.yaml (with the .json beside it) or of a folder and the folders in it.

    Raises EvaluationError where there is nothing, or a file is unreadable; CheckpointError for a damaged checkpoint.
    """
    if path.is_file():
        return _sort_out(path.parent, {}, _plan_files(path))
    if not path.is_dir():
        raise EvaluationError(f"report {path}: no such file or folder; give a plan.yaml or a folder of results")
    folders = [path, *sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))]
    checkpoints: dict[str, Document] = {}
    for folder in folders:
        if (folder / "config.json").is_file() and is_quantized(str(folder)):
            checkpoints[folder.name] = summarize(folder).to_json()
    sources = _sort_out(path, checkpoints, [file for folder in folders for file in sorted(folder.glob("*.json"))])
    if sources.empty:
        raise EvaluationError(
            f"report {path}: holds no checkpoint, plan or measurement; make some with quantkit search, or with "
            "quantkit compare and eval, which write their numbers as JSON"
        )
    return sources


def _plan_files(path: Path) -> list[Path]:
    document = path.with_suffix(".json")
    if not document.is_file():
        raise EvaluationError(f"report {path}: {document.name} is not beside it; quantkit search writes both")
    if _kind(_read(document)) != "searches":
        raise EvaluationError(f"report {path}: {document.name} was not written by quantkit search")
    return [document]


def _sort_out(root: Path, checkpoints: dict[str, Document], files: list[Path]) -> Sources:
    found: dict[str, dict[str, Document]] = {
        kind: {} for kind in ("searches", "divergences", "perplexities", "comparisons", "tables")
    }
    for file in files:
        document = _read(file)
        kind = _kind(document)
        if kind is not None:
            check_document(document, CHECKS[kind], f"report: {file}", EvaluationError)
            found[kind][str(file.relative_to(root))] = document
    return Sources(checkpoints=checkpoints, **found)


def _read(path: Path) -> Any:
    return read_json(path, f"report: {path}", EvaluationError)


def _kind(document: Any) -> str | None:
    """Which measurement a JSON document holds; None for anything else."""
    if not isinstance(document, dict):
        return None
    kind = document.get("kind")
    if isinstance(kind, str) and kind in _KINDS:
        return _KINDS[kind]
    if {"mean_kl", "histogram", "same_top1"} <= document.keys():
        return "divergences"
    if {"perplexity", "stderr", "text_sha256", "recipe"} <= document.keys():
        return "perplexities"
    rows = document.get("rows")
    if isinstance(rows, list) and rows and all(map(_is_recipe_row, rows)):
        return "tables"
    return None


def _is_recipe_row(row: Any) -> bool:
    """Whether a row is the perplexity of a recipe, or of another toolkit; other scripts' tables are not shown."""
    return isinstance(row, dict) and "evaluation" in row and ("recipe" in row or "peer" in row)
