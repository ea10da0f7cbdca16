"""Corpora: exact text from every kind of source, and one clear line for everything that cannot be read."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from quantkit.data.corpora import Corpus, check_text, load_text, text_digest
from quantkit.errors import DataError
from tests.network import HUB_ANSWER_SECONDS, cut_network

Dataset = pytest.importorskip("datasets", reason="datasets is not installed").Dataset

ROWS = ["", " = Heading = \n", "", " A line .\n", " Another , longer line .\n"]


def _jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _refusal(dataset: str | None, text: Path | None) -> str:
    with pytest.raises(DataError) as caught:
        load_text(dataset, text, split="test")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_txt_is_one_document_kept_as_it_is(tmp_path: Path) -> None:
    content = "  first\n\n\nsecond é \n"
    path = tmp_path / "a.txt"
    path.write_text(content, encoding="utf-8")
    corpus = load_text(None, path, split="test")
    assert corpus.text == corpus.raw == content
    assert corpus.sha256 == hashlib.sha256(content.encode()).hexdigest()
    assert corpus.name == "a.txt"


def test_jsonl_and_parquet_rows_are_joined_by_a_blank_line(tmp_path: Path) -> None:
    jsonl = _jsonl(tmp_path / "a.jsonl", [{"text": row, "id": number} for number, row in enumerate(ROWS)])
    parquet = tmp_path / "a.parquet"
    Dataset.from_dict({"text": ROWS}).to_parquet(parquet)
    for path in (jsonl, parquet):
        corpus = load_text(None, path, split="test")
        assert corpus.rows == tuple(ROWS)
        assert corpus.text == "\n\n".join(ROWS)


def test_raw_text_restores_the_file_that_the_rows_were_cut_from() -> None:
    original = " \n = Heading = \n \n A line .\n Another , longer line .\n"
    assert Corpus("wikitext", tuple(ROWS)).raw == original


def test_raw_text_of_documents_is_their_join() -> None:
    assert Corpus("documents", ("one", "two\n")).raw == "one\n\ntwo\n"


def test_pydoc_needs_no_network_and_holds_out_its_test_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantkit.data.corpora.hub_problem", lambda: pytest.fail("asked the hub"))
    train, test = (load_text("pydoc", None, split=split) for split in ("train", "test"))
    assert set(train.rows).isdisjoint(test.rows)
    assert len(test.rows) < len(train.rows)
    assert test.name == "pydoc/test"
    assert load_text("pydoc", None, split="test").sha256 == test.sha256


def test_digest_is_that_of_the_utf8_text() -> None:
    assert text_digest("é") == hashlib.sha256("é".encode()).hexdigest()


@pytest.mark.parametrize("dataset", ["wikitext2", "c4"])
def test_unreachable_hub_answers_in_time_and_names_the_offline_ways(
    dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_network(monkeypatch)
    started = time.perf_counter()
    message = _refusal(dataset, None)
    assert time.perf_counter() - started < HUB_ANSWER_SECONDS
    assert f"dataset {dataset}: the hub (https://hub.invalid) cannot be reached" in message
    assert "`dataset` pydoc" in message
    assert "HF_HUB_OFFLINE=1" in message


def test_offline_mode_leaves_the_cache_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_text("wikitext2", None)


def test_neither_or_both_sources_are_refused(tmp_path: Path) -> None:
    assert "give either `dataset`" in _refusal(None, None)
    assert "give either `dataset`" in _refusal("pydoc", tmp_path / "a.txt")


def test_unknown_dataset_lists_the_known_ones() -> None:
    assert "known are wikitext2, c4, pydoc" in _refusal("wikitext", None)


def test_missing_file_and_bad_suffix_are_named(tmp_path: Path) -> None:
    assert "no such file" in _refusal(None, tmp_path / "none.txt")
    assert "suffix '.csv'" in _refusal(None, tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"content": "x"}\n', "no column 'text'; it has 'content'"),
        ("a.jsonl", b'{"text": 3}\n', "column 'text' holds int"),
        ("a.jsonl", b'{"text": "x"\n{{', "cannot be read"),
        ("a.jsonl", b"", "it is empty"),
        ("a.txt", b" \n", "it is empty"),
        ("a.txt", b"\xff\xfe\x80", "cannot be read"),
        ("a.parquet", b"PAR0", "cannot be read"),
    ],
    ids=["no-column", "not-text", "broken-json", "empty-jsonl", "blank-txt", "not-utf8", "not-parquet"],
)
def test_unreadable_files_say_why(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in _refusal(None, tmp_path / name)


@pytest.mark.parametrize("name", ["a[1].txt", "[x].txt", "b*.txt", "c?.txt", "d{1,2}.txt", "e f.txt", "g#h.txt"])
def test_text_is_a_path_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("its own words")
    (tmp_path / "a1.txt").write_text("another file's words")
    (tmp_path / "b_other.txt").write_text("another file's words")
    assert load_text(None, tmp_path / name, split="test").text == "its own words"


def test_an_asterisk_stands_for_many_files_where_no_file_is_called_so(tmp_path: Path) -> None:
    for name in ("2", "1", "10"):
        _jsonl(tmp_path / f"part-{name}.jsonl", [{"text": name}])
    (tmp_path / "part-x.jsonl").mkdir()
    assert load_text(None, tmp_path / "part-*.jsonl", split="test").rows == ("1", "10", "2")
    assert "no such file" in _refusal(None, tmp_path / "part-[12].jsonl")
    assert "no such file" in _refusal(None, tmp_path / "none-*.jsonl")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert "no such file" in _refusal(None, tmp_path / "pipe.txt")
    assert "File name too long" in _refusal(None, tmp_path / ("n" * 300 + ".txt"))
