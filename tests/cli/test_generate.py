from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import quantkit.jobs.generate as job
from quantkit.cli.app import app
from quantkit.cli.generate import EXIT_INTERRUPTED
from quantkit.nn.quantized_linear import QuantizedLinear
from tests.cli.calls import refusal, run
from tests.pipeline import quantize_tiny

TinyModel = Callable[[str], Path]


def test_continues_the_prompt_and_tells_times(tiny_model: TinyModel) -> None:
    result = run("generate", tiny_model("llama"), "--prompt", "the model", "--new", "5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("the model")
    assert "tokens/s" in result.stderr


def test_several_prompts_come_in_their_order(tiny_model: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("the model\n\nit thinks\n")
    by_option = run("generate", tiny_model("opt"), "--prompt", "the model", "--prompt", "it thinks", "--new", "4")
    by_file = run("generate", tiny_model("opt"), "--file", file, "--new", "4")
    assert by_option.exit_code == 0, by_option.stderr
    assert by_option.stdout == by_file.stdout
    assert by_file.stdout.index("the model") < by_file.stdout.index("it thinks")


def test_a_quantized_model_says_that_its_weights_are_expanded(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "q")
    result = run("generate", tmp_path / "q", "--prompt", "the model", "--new", "4", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "weights are expanded once for the CPU (12 Linears" in result.stderr


@pytest.mark.parametrize(("count", "layout"), [(1, "latency"), (3, "few"), (5, "batch")])
def test_weights_are_ordered_for_as_many_prompts(
    count: int, layout: str, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_tiny(tiny_model("opt"), tmp_path / "q")
    opened: list[job.Generator] = []

    def remember(generator: job.Generator, prompts: list[str], *_: object) -> list[str]:
        opened.append(generator)
        return prompts

    monkeypatch.setattr(job, "answer", remember)
    monkeypatch.setattr(job, "expand_weights", lambda _: None)  # as on a GPU
    assert run("generate", tmp_path / "q", *["--prompt", "it"] * count, "--device", "cpu").exit_code == 0
    linears = [module for module in opened[0].model.modules() if isinstance(module, QuantizedLinear)]
    assert {module.layout for module in linears} == {layout}


def test_a_conversation_holds_what_was_said(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def remember(_generator: object, prompts: list[list[dict[str, str]]], *_: object) -> list[str]:
        asked.append([message["content"] for message in prompts[0]])
        return [""]

    monkeypatch.setattr(job, "answer", remember)
    given = "one\n\ntwo\n"
    result = CliRunner().invoke(app, ["generate", str(tiny_model("llama")), "--interactive"], input=given)
    assert result.exit_code == 0, result.stderr
    assert asked == [["one"], ["one", "", "two"]]


def test_interrupting_ends_with_the_times(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "answer", interrupt)
    result = run("generate", tiny_model("llama"), "--prompt", "the model")
    assert result.exit_code == EXIT_INTERRUPTED
    assert "0 tokens" in result.stderr


def test_missing_model_is_refused(tmp_path: Path) -> None:
    assert "absent" in refusal("generate", tmp_path / "absent", "--prompt", "x")


def test_empty_prompt_is_refused(tiny_model: TinyModel) -> None:
    assert "the prompt has no tokens" in refusal("generate", tiny_model("gpt2"), "--prompt", "")


def test_no_prompt_and_two_kinds_of_prompts_are_refused(tiny_model: TinyModel) -> None:
    assert "one of the three" in refusal("generate", tiny_model("gpt2"))
    assert "one of the three" in refusal("generate", tiny_model("gpt2"), "--prompt", "x", "--interactive")


def test_an_empty_file_of_prompts_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "none.txt").write_text("\n\n")
    assert "holds no prompt" in refusal("generate", tiny_model("gpt2"), "--file", tmp_path / "none.txt")


def test_drawing_settings_without_a_temperature_are_refused(tiny_model: TinyModel) -> None:
    assert "--temperature above 0" in refusal("generate", tiny_model("gpt2"), "--prompt", "x", "--top-k", "5")
