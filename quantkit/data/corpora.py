"""Text to calibrate and evaluate on: hub datasets, local files, and the offline text every Python carries."""

from __future__ import annotations

import glob
import hashlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from quantkit.errors import DataError, refusing
from quantkit.hub import hub_problem

Split = Literal["train", "test"]

TEXT_COLUMN = "text"
ROW_SEPARATOR = "\n\n"
_WIKITEXT_BLANK_LINE = " \n"
_C4_DOCUMENTS = 4096  # about 9 MB: many times what calibration reads, a small part of the first shard
_PYDOC_TEST_EVERY = 4  # pages; what is calibrated on must not be evaluated on
_OFFLINE_WAYS = "use `dataset` pydoc, `text` FILE, or HF_HUB_OFFLINE=1 with a cached download"


@dataclass(frozen=True)
class Corpus:
    """A named text.

    name: what it is and which part, for reports. rows: the documents or lines it was stored as.
    """

    name: str
    rows: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """The rows joined by a blank line, as every GPTQ-style perplexity does."""
        return ROW_SEPARATOR.join(self.rows)

    @cached_property
    def raw(self) -> str:
        """The file as it was before it became rows, as llama.cpp reads it.

        Rows that each end their own line (WikiText on the hub) are put end to end; an empty one stands for
        WikiText's blank line, which holds a space. Other rows are documents and joined as in ``text``.
        """
        if any(row and not row.endswith("\n") for row in self.rows):
            return self.text
        return "".join(row or _WIKITEXT_BLANK_LINE for row in self.rows)

    @property
    def sha256(self) -> str:
        """Digest of ``text`` in UTF-8."""
        return text_digest(self.text)


@dataclass(frozen=True)
class _Dataset:
    """One row of DATASETS: (split) -> rows; ``hub`` is its id there, or None if it needs no network."""

    rows: Callable[[Split], Iterator[str]]
    hub: str | None = None


def text_digest(text: str) -> str:
    """sha256 of the text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def check_text(dataset: str | None, text: Path | None) -> None:
    """Refuse an impossible choice of text before anything heavy is imported.

    Raises DataError for none or two, an unknown dataset, a missing file, a wrong suffix or an unreachable hub.
    """
    if (dataset is None) == (text is None):
        raise DataError(f"give either `dataset` ({', '.join(DATASETS)}) or `text` FILE")
    if text is not None:
        if text.suffix not in _READERS:
            raise DataError(f"text {text}: suffix {text.suffix!r} is not one of {', '.join(_READERS)}")
        with refusing(f"text {text} cannot be read", DataError):
            files = text_files(text)
        if not files:
            raise DataError(f"text {text}: no such file")
        return
    if dataset not in DATASETS:
        raise DataError(f"dataset {dataset!r}: known are {', '.join(DATASETS)}; use `text` FILE for your own")
    if DATASETS[dataset].hub is not None:
        problem = hub_problem()
        if problem is not None and not problem.startswith("HF_HUB_OFFLINE"):
            raise DataError(f"dataset {dataset}: {problem}; {_OFFLINE_WAYS}")


def check_drawn(dataset: str | None, text: Path | None, *, windows: int, written: int) -> bool:
    """check_text where the model writes ``written`` of the windows itself; whether a text is read.

    Raises DataError also where it would write more than all, or where it writes all and a text is left over.
    """
    if written > windows:
        raise DataError(f"`written` {written}: more than `windows` {windows}, of which they are")
    if written < windows:
        check_text(dataset, text)
    elif dataset is not None or text is not None:
        raise DataError(f"`written` {written}: the model writes all `windows`; leave the text out, or draw more")
    return written < windows


def text_files(text: Path) -> list[Path]:
    """The files that a path names: the file itself, or, where there is none and it holds ``*``, all that match it."""
    if text.is_file() or "*" not in str(text):
        return [text] if text.is_file() else []
    return [Path(name) for name in sorted(glob.glob(str(text))) if Path(name).is_file()]  # noqa: PTH207


def load_text(dataset: str | None, text: Path | None, *, split: Split) -> Corpus:
    """The text of a known dataset (its ``split``) or of a local file, or files (all of them).

    Files: .txt is one document, .jsonl and .parquet hold a column "text". Nothing is written to a cache.
    Raises DataError as check_text does, and for unreadable files, a missing column or an empty text.
    """
    check_text(dataset, text)
    if text is not None:
        name, hint = text.name, f"expected UTF-8 text, or rows with a column {TEXT_COLUMN!r}"
        with _quietly(), refusing(f"text {text} cannot be read", DataError, hint):
            files = [file for file in text_files(text) if file.stat().st_size]
            rows = tuple(row for file in files for row in _READERS[file.suffix](file))
    else:
        assert dataset is not None
        name = f"{dataset}/{split}"
        quietly = _quietly() if DATASETS[dataset].hub else nullcontext()
        with quietly, refusing(f"dataset {dataset} cannot be read", DataError, _OFFLINE_WAYS):
            rows = tuple(DATASETS[dataset].rows(split))
    corpus = Corpus(name, rows)
    if not corpus.text.strip():
        raise DataError(f"text {name}: it is empty")
    return corpus


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what ``datasets`` logs of bad input off the screen: the error says it in one line."""
    from datasets import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _column(dataset: Any, what: str) -> Iterator[str]:
    for row in dataset:
        if TEXT_COLUMN not in row:
            raise DataError(f"{what}: no column {TEXT_COLUMN!r}; it has {', '.join(map(repr, row))}")
        if not isinstance(row[TEXT_COLUMN], str):
            raise DataError(f"{what}: column {TEXT_COLUMN!r} holds {type(row[TEXT_COLUMN]).__name__}, not text")
        yield row[TEXT_COLUMN]


def _local_rows(builder: str, options: Mapping[str, Any]) -> Callable[[Path], Iterator[str]]:
    """A reader of one local file through a packaged builder of ``datasets``, streamed so that no cache is written.

    ``datasets`` takes a path for a pattern: it is escaped, or ``a[1].txt`` would be read as ``a1.txt``.
    """

    def read(path: Path) -> Iterator[str]:
        import datasets

        files = {"train": glob.escape(str(path.absolute()))}
        stream = datasets.load_dataset(builder, data_files=files, split="train", streaming=True, **options)
        return _column(stream, f"text {path}")

    return read


def _wikitext_rows(split: Split) -> Iterator[str]:
    import datasets

    return _column(datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split=split), "dataset wikitext2")


def _c4_rows(split: Split) -> Iterator[str]:
    import datasets

    shard = {"train": "en/c4-train.00000-of-01024.json.gz", "test": "en/c4-validation.00000-of-00008.json.gz"}[split]
    stream = datasets.load_dataset("allenai/c4", data_files={split: shard}, split=split, streaming=True)
    return islice(_column(stream, "dataset c4"), _C4_DOCUMENTS)


def _pydoc_rows(split: Split) -> Iterator[str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    # Some topics have two names: by distinct text, or the same page would be calibrated and evaluated on.
    for index, page in enumerate(sorted(set(topics.values()))):
        if (index % _PYDOC_TEST_EVERY == 1) == (split == "test"):
            yield page


_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _local_rows("text", {"sample_by": "document"}),
    ".jsonl": _local_rows("json", {}),
    ".parquet": _local_rows("parquet", {}),
}

# pydoc: the language reference of the running Python, about half a megabyte of English; it differs between versions.
DATASETS: dict[str, _Dataset] = {
    "wikitext2": _Dataset(_wikitext_rows, hub="Salesforce/wikitext"),
    "c4": _Dataset(_c4_rows, hub="allenai/c4"),
    "pydoc": _Dataset(_pydoc_rows),
}
