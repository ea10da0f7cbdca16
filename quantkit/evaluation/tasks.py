"""Accuracy on tasks through lm-evaluation-harness, from the hub by name or from local files.

The YAML files in task_configs describe the tasks on local files: a data file's path is relative to the data folder.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantkit.errors import EvaluationError
from quantkit.storage.documents import read_text

CONFIGS = Path(__file__).parent / "task_configs"
_BATCH_SIZES = {"cpu": 8, "cuda": 64}  # logits of 64 requests of 200 tokens: 2.5 GB at a vocabulary of 50,000
_BOOTSTRAP = 100  # resamplings for the standard error of a perplexity; accuracies have theirs in closed form


@dataclass(frozen=True)
class TaskOptions:
    """tasks: names. task_path: folder of further task YAMLs. data_dir: folder that the shipped YAMLs find files in.

    limit: examples per task, None for all. batch_size: requests at once, None for 8 on a CPU and 64 on a GPU.
    """

    tasks: tuple[str, ...]
    task_path: Path | None = None
    data_dir: Path | None = None
    limit: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task, with its standard error (None where lm-eval gives none) and the examples scored."""

    task: str
    metric: str
    value: float
    stderr: float | None
    examples: int


def local_tasks() -> list[str]:
    """Names of the tasks whose YAML files ship with quantkit."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def check_tasks(options: TaskOptions) -> None:
    """Refuse, before a model is loaded, what cannot be evaluated.

    Raises EvaluationError where lm_eval is not installed, a folder or data file is missing, or a number is below 1.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise EvaluationError("tasks are evaluated by lm_eval, which is not installed: pip install 'quantkit[eval]'")
    if not options.tasks or not all(options.tasks):
        raise EvaluationError(f"`tasks`: name at least one; local ones are {', '.join(local_tasks())}")
    if options.limit is not None and options.limit < 1:
        raise EvaluationError(f"`limit` {options.limit}: at least 1 is needed")
    if options.batch_size is not None and options.batch_size < 1:
        raise EvaluationError(f"`batch_size` {options.batch_size}: at least 1 is needed")
    for name, folder in (("task_path", options.task_path), ("data_dir", options.data_dir)):
        if folder is not None and not folder.is_dir():
            raise EvaluationError(f"`{name}` {folder}: no such folder")
    task_specs(options)


def task_specs(options: TaskOptions) -> list[str | dict[str, Any]]:
    """What lm-eval is asked for: with a data folder the shipped YAMLs, their data files found; else the names.

    A task in the user's own folder goes before a shipped one of the same name.
    Raises EvaluationError for a data file that is not there.
    """
    specs: list[str | dict[str, Any]] = []
    for name in options.tasks:
        own = options.task_path is not None and name in _names_in(options.task_path)
        local = options.data_dir is not None and name in local_tasks() and not own
        specs.append(_with_data(name, options.data_dir) if local and options.data_dir else name)
    return specs


def _names_in(folder: Path) -> set[str]:
    """Task names of the YAML files under a folder; a file that is no plain YAML is left for lm-eval to read.

    Raises EvaluationError for one that is no text or no regular file.
    """
    names = set()
    for path in folder.rglob("*.yaml"):
        for line in read_text(path, f"task file {path}", EvaluationError).splitlines():
            if line.startswith("task:"):
                names.add(line.removeprefix("task:").strip().strip("'\""))
    return names


def _with_data(name: str, data_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    found = {}
    for split, relative in config["dataset_kwargs"]["data_files"].items():
        path = (data_dir / relative).absolute()
        if not path.is_file():
            raise EvaluationError(f"task {name}: `data_dir` {data_dir} has no {relative}")
        found[split] = str(path)
    return {**config, "dataset_kwargs": {"data_files": found}}


def evaluate_tasks(model: Any, tokenizer: Any, options: TaskOptions) -> list[TaskScore]:
    """Zero-shot scores of a loaded model, on its device.

    Raises EvaluationError as check_tasks does, for an unknown task, and where a hub dataset cannot be had.
    """
    check_tasks(options)
    specs = task_specs(options)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own = _names_in(options.task_path) if options.task_path else set()
    # The index of lm-eval's own tasks takes 13 seconds to read: only where one of them is asked for.
    defaults = any(isinstance(spec, str) and spec not in own for spec in specs)
    path = str(options.task_path) if options.task_path else None
    manager = TaskManager(include_path=path, include_defaults=defaults)
    unknown = [spec for spec in specs if isinstance(spec, str) and spec not in manager.task_index]
    if unknown:
        raise EvaluationError(f"task {unknown[0]!r}: neither lm-eval nor `task_path` has it")
    batch_size = options.batch_size or _BATCH_SIZES[model.device.type]
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        with redirect_stdout(sys.stderr):  # lm-eval prints notices among what should be results
            answer: Any = simple_evaluate(
                model=wrapped,
                tasks=specs,
                task_manager=manager,
                limit=options.limit,
                bootstrap_iters=_BOOTSTRAP,
                log_samples=False,
            )
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "without a network, use `data_dir` with local files"
        raise EvaluationError(f"tasks {', '.join(options.tasks)}: {reason}; {hint}") from error
    return _scores(answer)


def _scores(answer: Any) -> list[TaskScore]:
    scores = []
    for task, numbers in answer["results"].items():
        examples = int(answer.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in numbers.items():
            metric, _, kind = key.partition(",")
            if kind and not metric.endswith("_stderr") and isinstance(value, (int, float)):
                stderr = numbers.get(f"{metric}_stderr,{kind}")
                error = float(stderr) if isinstance(stderr, (int, float)) else None
                scores.append(TaskScore(task, metric, float(value), error, examples))
    return scores
