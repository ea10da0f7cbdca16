"""What the README and the other pages tell a reader to type, and where they lead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline import quantize_tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.joinpath("docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#]*)(#[^)]*)?\)")
SCRIPT = re.compile(r"scripts/[\w/]+\.py")


def test_the_snippet_of_the_readme_runs(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the CPU, with a tiny checkpoint in the place of "out"."""
    quantize_tiny(tiny_model("llama"), tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(snippet.replace('"cuda"', '"cpu"'), "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("The capital of France is")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_scripts_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{target}{anchor}"
    if page.name != "log.md":  # that one names what was thrown away as well
        for script in SCRIPT.findall(re.sub(r"Measured on .*?\n\n.*?\n", "", text)):
            assert (ROOT / script).exists(), script
