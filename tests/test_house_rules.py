"""The rules that keep the code base one: import direction, words, file length, a fast --help."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quantkit"
MAX_LINES = 350
HELP_FACTOR = 3.0  # measured: 1.9
TYPER = "import typer; app = typer.Typer(); app.command()(lambda: None); app(['--help'])"  # with no commands of ours
SLOW_IMPORTS = ("torch", "transformers", "datasets", "accelerate", "cupy", "numpy", "matplotlib")

# Floors, lowest first; a module imports from its own floor or below.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "assets", "cpu", "recipe", "stats", "progress", "hub", "memory", "ranks", "storage"),
    ("formats", "cuda"),
    ("ops", "models", "data"),
    ("nn", "quantizers", "calibration"),
    ("methods", "evaluation", "tuning"),
    ("checkpoint",),
    ("exchange",),
    ("runtime",),
    ("integrations",),
    ("search",),
    ("jobs",),
    ("report",),
    ("bench",),  # measures; nothing but the commands uses it
    ("cli", "__main__"),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}

# Word -> what to call it. Words are parts of identifiers: chunk_tokens holds "chunk" and "tokens".
BANNED: dict[str, str] = {
    "siblings": "merged Linears: they are one product, wherever they stand",
    "settle": "prepare_for_device; settled says that nothing writes a weight any more",
    "unturned": "rotary",
    "parted": "chunk: a batch is taken in chunks",
    "turn": "rotary: angles rotate a head; step: a pass of a loop",
    "unturn": "rotary",
}
# In these rooms only; elsewhere they mean something else, such as rows of a table.
BANNED_IN: dict[str, dict[str, str]] = {
    "ops": {"finish": "epilogue", "finished": "epilogue"},
    "runtime": {"rows": "M: tokens; N: out_features", "columns": "K: in_features", "slices": "split-KV"},
    "nn": {"rows": "M: tokens; N: out_features", "columns": "K: in_features"},
    "models": {"rows": "M: tokens; N: out_features", "columns": "K: in_features"},
    "integrations": {"rows": "M: tokens; N: out_features", "columns": "K: in_features"},
    "bench": {"rows": "M: tokens; N: out_features"},
}
# Modules that run other programs, whose options stand in their strings.
RUN_PROGRAMS = ("models/demo.py", "bench/report.py", "cuda/compile.py")
OPTION = re.compile(r"(?:^|[\s`'\"(])(--[a-z][a-z-]+)")


def _modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def _imports(tree: ast.AST) -> set[str]:
    """First components under quantkit of all imports, those in functions and for type checkers too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("quantkit.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "quantkit":
            found |= {alias.name for alias in node.names if alias.name in FLOOR_OF}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("quantkit."):
            found.add(node.module.split(".")[1])
    return found


def _identifiers(tree: ast.AST) -> Iterator[str]:
    """Names, attributes, arguments, keywords, and what is defined or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from (node.name.rpartition(".")[2], node.asname or "")


def _words(identifier: str) -> set[str]:
    """``_taken_turns`` and ``TakenTurns`` -> taken, turns; none of a constant, which other rooms may have named."""
    if identifier.isupper():
        return set()
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def _texts(tree: ast.AST) -> Iterator[str]:
    """Every string, an f-string with {} for its values."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    upward = {name for name in _imports(_tree(path)) if FLOOR_OF[name] > FLOOR_OF[own]}
    assert not upward, f"{own} (floor {FLOOR_OF[own]}) imports {upward}"


def test_imports_are_found_wherever_they_stand() -> None:
    code = (
        "import quantkit.bench.timing\nfrom quantkit import recipe\n"
        "def f():\n    from quantkit.cli import app\nif TYPE_CHECKING:\n    from quantkit.jobs.search import x"
    )
    assert _imports(ast.parse(code)) == {"bench", "recipe", "cli", "jobs"}


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_identifiers_are_the_fields_words(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    banned = BANNED | BANNED_IN.get(room, {})
    found = {(name, banned[word]) for name in _identifiers(_tree(path)) for word in _words(name) & banned.keys()}
    assert not found


def test_banned_words_are_found_in_every_kind_of_identifier() -> None:
    code = "def parted(a, *, settle): ...\nclass SiblingsOf: ...\nx.unturned_by = f(siblings=1)\nimport a.settle as b"
    found = [word for name in _identifiers(ast.parse(code)) for word in sorted(_words(name) & BANNED.keys())]
    assert sorted(found) == ["parted", "settle", "settle", "siblings", "siblings", "unturned"]


@pytest.mark.parametrize("path", [path for path in _modules() if "cli" not in path.parts], ids=_name)
def test_the_library_speaks_of_parameters_and_not_of_options(path: Path) -> None:
    if _name(path) in RUN_PROGRAMS:
        return
    # A whole command to copy may name options.
    texts = (text for text in _texts(_tree(path)) if not text.startswith("quantkit "))
    assert not {option for text in texts for option in OPTION.findall(text)}


def test_files_stay_within_the_line_cap() -> None:
    sources = [p.relative_to(ROOT) for p in ROOT.rglob("*") if p.suffix in (".py", ".cu", ".cuh")]
    ours = [p for p in sources if not p.parts[0].startswith(".")]  # not environments, nor what tools leave
    too_long = {str(p): n for p in ours if (n := len((ROOT / p).read_text().splitlines())) > MAX_LINES}
    assert not too_long


def test_help_imports_nothing_slow() -> None:
    probe = f"import sys, quantkit.cli.app; print([m for m in {SLOW_IMPORTS!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_help_answers_quickly() -> None:
    """Processor time beside typer's own, the best of runs taking turns: other work or a slow CPU must not fail it."""

    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    runs = [(seconds("-c", TYPER), seconds("-m", "quantkit", "--help")) for _ in range(5)]
    typer, ours = (min(column) for column in zip(*runs, strict=True))
    assert ours < HELP_FACTOR * typer
