"""What a search chooses from, and the file that an error table is cached in."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantkit.errors import RecipeError, StatsError
from quantkit.search import table as table_module
from quantkit.search.table import Option, TableFile, options_of


def test_cache_ignores_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    TableFile(path).add("measured", "a", Option(3, 64), kl=0.5)
    path.write_bytes(path.read_bytes() + b'{"kind": "mea')
    again = TableFile(path)
    assert list(again.rows) == [("measured", "a", Option(3, 64))]
    again.add("measured", "b", Option(3, 64), kl=0.25)
    assert len(TableFile(path).rows) == 2


@pytest.mark.parametrize("damage", [(b"0.5", b"0.6"), (b"{", b""), (b'"a"', b'"b"')], ids=["number", "brace", "name"])
def test_a_damaged_line_of_the_cache_is_refused_with_its_number(damage: tuple[bytes, bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for layer in ("a", "b"):
        TableFile(path).add("measured", layer, Option(3, 64), kl=0.5)
    path.write_bytes(path.read_bytes().replace(*damage, 1))
    with pytest.raises(RecipeError, match=r"line 1 cannot be read .*; remove the file, and the search fills it again"):
        TableFile(path)


def test_a_cache_keeps_no_nan_and_leaves_no_empty_file(tmp_path: Path) -> None:
    table = TableFile(tmp_path / "t.jsonl")
    with pytest.raises(StatsError, match="is NaN or Inf"):
        table.add("measured", "a", Option(3, 64), kl=float("nan"))
    assert list(tmp_path.iterdir()) == []


def test_the_code_that_fills_a_table_is_all_of_it() -> None:
    names = {path.name for path in table_module._solver_files()}
    assert {"bcq.py", "quantizer.py", "compensation.py", "sensitivity.py", "gradients.py"} <= names


def test_trellis_codes_are_searched_from_two_to_four_bits_by_row() -> None:
    assert options_of("trellis", None, None) == [Option(2, -1), Option(3, -1), Option(4, -1)]
