from collections.abc import Callable
from pathlib import Path

from tests.cli.calls import refusal, run


def test_continues_the_prompt(tiny_model: Callable[[str], Path]) -> None:
    result = run("generate", tiny_model("llama"), "--prompt", "the model", "--new", "5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("the model")


def test_missing_model_is_refused(tmp_path: Path) -> None:
    assert "absent" in refusal("generate", tmp_path / "absent", "--prompt", "x")


def test_empty_prompt_is_refused(tiny_model: Callable[[str], Path]) -> None:
    assert "the prompt has no tokens" in refusal("generate", tiny_model("gpt2"), "--prompt", "")
