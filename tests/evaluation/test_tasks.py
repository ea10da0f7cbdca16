"""Tasks through lm-eval against hand computations on five rows, and what is refused before a model is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import EvaluationError
from quantkit.evaluation import tasks as tasks_module
from quantkit.evaluation.tasks import TaskOptions, check_tasks, evaluate_tasks, local_tasks, task_specs
from quantkit.models.loading import load_model

needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed (pip install 'quantkit[eval]')"
)

ROWS: dict[str, list[dict[str, Any]]] = {
    "lambada/lambada_test.jsonl": [
        {"text": f"the model reads a line of text and then it {word}"} for word in ("says", "reads", "a", "it", "came")
    ],
    "piqa/valid_labelled.jsonl": [
        {"goal": goal, "sol1": "reads a line", "sol2": 'it\'s the "word" it thinks of', "label": label}
        for goal, label in (("the model", 0), ("a line", 1), ("what it says", 1), ("every word", 0), ("of text", 0))
    ],
    "openbookqa/test.jsonl": [
        {
            "question": {
                "stem": stem,
                "choices": [
                    {"text": text, "label": label}
                    for text, label in (("reads", "A"), ("the line", "B"), ("it's a word", "C"), ("before", "D"))
                ],
            },
            "answerKey": key,
        }
        for stem, key in (("the model", "A"), ("then it", "B"), ("every word", "C"), ("came", "D"), ("a line of", "A"))
    ],
    "winogrande/dev.jsonl": [
        {"sentence": f"{start} so _ {end}.", "option1": "the model", "option2": "a word", "answer": answer}
        for start, end, answer in (
            ("it reads", "came before", "1"),
            ("it says", "thinks of it", "2"),
            ("the text came", "reads a line", "1"),
            ("a line", "says what it thinks", "2"),
            ("it came", "reads it", "1"),
        )
    ],
    "hellaswag/hellaswag_val.jsonl": [
        {
            "activity_label": label,
            "ctx_a": "the model reads [step] a line.",
            "ctx_b": "then it",
            "endings": ["says [title] the word", "  thinks  of text", "came [sub] before", "reads what it says"],
            "label": gold,
        }
        for label, gold in (("text", 0), ("line", 1), ("word", 2), ("model", 3), ("before", 1))
    ],
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in ROWS.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def loaded(tiny_model: Callable[[str], Path]) -> tuple[Any, Any]:
    return load_model(str(tiny_model("opt")))


@torch.no_grad()
def _log_likelihood(loaded: tuple[Any, Any], context: str, continuation: str) -> tuple[float, bool]:
    """(sum of log p of the continuation's tokens, whether each is the likeliest)."""
    model, tokenizer = loaded
    ids = torch.tensor(tokenizer(context + continuation)["input_ids"])
    start = len(tokenizer(context)["input_ids"])
    scores = model(ids[None]).logits[0].double().log_softmax(-1)[start - 1 : -1]
    targets = ids[start:]
    return float(scores.gather(-1, targets[:, None]).sum()), bool((scores.argmax(-1) == targets).all())


def _best(scores: list[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def _by_hand(loaded: tuple[Any, Any], task: str) -> dict[str, float]:
    """Accuracy (and by length of the choice) over the five rows, from each task's definition."""
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    (rows,) = [rows for name, rows in ROWS.items() if name.startswith(task.removesuffix("_openai"))]
    for row in rows:
        if task == "lambada_openai":
            context, word = row["text"].rsplit(" ", 1)
            hits["acc"].append(_log_likelihood(loaded, context, " " + word)[1])
            continue
        contexts, endings, gold = _choices(task, row)
        scores = [_log_likelihood(loaded, c, " " + e)[0] for c, e in zip(contexts, endings, strict=True)]
        hits["acc"].append(_best(scores) == gold)
        if task != "winogrande":
            hits["acc_norm"].append(_best([s / len(e) for s, e in zip(scores, endings, strict=True)]) == gold)
    return {metric: sum(found) / len(found) for metric, found in hits.items() if found}


def _choices(task: str, row: dict[str, Any]) -> tuple[list[str], list[str], int]:
    if task == "piqa":
        return [f"Question: {row['goal']}\nAnswer:"] * 2, [row["sol1"], row["sol2"]], row["label"]
    if task == "openbookqa":
        texts = [choice["text"] for choice in row["question"]["choices"]]
        return [row["question"]["stem"]] * 4, texts, "ABCD".index(row["answerKey"])
    if task == "winogrande":
        before, after = row["sentence"].split("_")
        return [before + row["option1"], before + row["option2"]], [after.strip()] * 2, int(row["answer"]) - 1
    context = _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return [context] * 4, [_clean(ending) for ending in row["endings"]], row["label"]


def _clean(text: str) -> str:
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


@needs_lm_eval
def test_accuracy_is_that_computed_by_hand(loaded: tuple[Any, Any], data_dir: Path) -> None:
    found = evaluate_tasks(*loaded, TaskOptions(tuple(local_tasks()), data_dir=data_dir, batch_size=2))
    for task in local_tasks():
        scores = {s.metric: s for s in found if s.task == task}
        for metric, expected in _by_hand(loaded, task).items():
            assert scores[metric].value == pytest.approx(expected), (task, metric)
            assert scores[metric].examples == 5
            # Bernoulli deviation over n - 1
            assert scores[metric].stderr == pytest.approx((expected * (1 - expected) / 4) ** 0.5), (task, metric)


@needs_lm_eval
def test_limit_and_own_task_folder(loaded: tuple[Any, Any], data_dir: Path, tmp_path: Path) -> None:
    own = (tasks_module.CONFIGS / "piqa.yaml").read_text().replace("task: piqa", "task: mine")
    (tmp_path / "mine.yaml").write_text(own.replace("piqa/valid", f"{data_dir}/piqa/valid"))
    found = evaluate_tasks(*loaded, TaskOptions(("mine", "piqa"), task_path=tmp_path, data_dir=data_dir, limit=3))
    values = {(s.task, s.metric): s.value for s in found}
    assert values["mine", "acc"] == values["piqa", "acc"]
    assert {s.examples for s in found} == {3}


@needs_lm_eval
def test_unknown_task_is_refused(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("task: mine\n")
    with pytest.raises(EvaluationError, match="'no_such_task': neither lm-eval nor `task_path` has it"):
        evaluate_tasks(*loaded, TaskOptions(("no_such_task",), task_path=tmp_path))


@pytest.fixture
def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EvaluationError, match=r"pip install 'quantkit\[eval\]'"):
        check_tasks(TaskOptions(("piqa",)))


@pytest.mark.usefixtures("pretend_installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("",)}, "name at least one"),
        ({"data_dir": Path("/none")}, "`data_dir` /none: no such folder"),
        ({"task_path": Path("/none")}, "`task_path` /none: no such folder"),
        ({"limit": 0}, "`limit` 0"),
        ({"batch_size": 0}, "`batch_size` 0"),
    ],
    ids=["no-task", "data-dir", "task-path", "limit", "batch-size"],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        check_tasks(TaskOptions(**{"tasks": ("piqa",), **options}))


@pytest.mark.usefixtures("pretend_installed")
def test_a_missing_data_file_is_named(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"task piqa: `data_dir` .* has no piqa/valid_labelled\.jsonl"):
        check_tasks(TaskOptions(("piqa",), data_dir=tmp_path))
    check_tasks(TaskOptions(("piqa",), data_dir=data_dir))


def test_a_task_file_that_cannot_be_read_is_named(data_dir: Path, tmp_path: Path) -> None:
    options = TaskOptions(("winogrande",), task_path=tmp_path, data_dir=data_dir)
    (tmp_path / "w.yaml").write_bytes(b"task: \xff\xfe\n")
    with pytest.raises(EvaluationError, match=r"task file .*w\.yaml cannot be read"):
        task_specs(options)
    (tmp_path / "w.yaml").unlink()
    os.mkfifo(tmp_path / "w.yaml")
    with pytest.raises(EvaluationError, match=r"w\.yaml cannot be read \(it is no regular file\)"):
        task_specs(options)


def test_data_files_are_absolute_and_other_tasks_keep_their_names(data_dir: Path, tmp_path: Path) -> None:
    local, other = task_specs(TaskOptions(("winogrande", "arc_easy"), data_dir=data_dir))
    assert isinstance(local, dict)
    assert local["dataset_kwargs"] == {"data_files": {"test": str(data_dir / "winogrande/dev.jsonl")}}
    assert other == "arc_easy"
    assert task_specs(TaskOptions(("winogrande",))) == ["winogrande"]
    (tmp_path / "w.yaml").write_text("task: winogrande\n")
    assert task_specs(TaskOptions(("winogrande",), task_path=tmp_path, data_dir=data_dir)) == ["winogrande"]
