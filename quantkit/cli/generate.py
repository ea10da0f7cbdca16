"""``quantkit generate``: continue prompts, or chat."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.common import DeviceOption, print_text
from quantkit.errors import DataError, GenerationError, refusing

if TYPE_CHECKING:
    from quantkit.jobs.generate import Generator, Message, Settings, Timing

EXIT_INTERRUPTED = 130


def generate(
    model: Annotated[str, typer.Argument(help="Folder (also a quantized one), hub id, or smollm2-135m.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A text to continue; again for several at once.")] = None,
    file: Annotated[Path | None, typer.Option(help="Prompts, one a line, all at once.")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="Chat: a prompt a line, until it ends.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Without the tokenizer's chat template.")] = False,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--new", help="Of each answer, at most.", min=1)
    ] = 128,
    temperature: Annotated[float, typer.Option(help="Of drawing; 0 takes the most probable token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the most probable tokens of this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Of drawing; the same seed draws the same.", min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; repeatable.")] = None,
    device: DeviceOption = None,
) -> None:
    """Continue prompts, or chat; text comes as it is made, times go to stderr.

    With a chat template a prompt is a question, and only the answer is printed; else the text is continued.
    """
    prompts = _prompts(prompt, file, interactive)
    from quantkit.models.loading import resolve_model

    resolve_model(model)
    from quantkit.jobs.generate import Settings, open_generator
    from quantkit.runtime.sampling import Sampling

    settings = Settings(max_new_tokens, Sampling(temperature, top_p, top_k, seed), tuple(stop or ()), raw)
    generator = open_generator(model, device, sequences=max(1, len(prompts)))
    _tell_expansion(generator)
    if interactive:
        _converse(generator, settings)
    else:
        _answer_all(generator, prompts, settings)


def _prompts(prompt: list[str] | None, file: Path | None, interactive: bool) -> list[str]:
    if (bool(prompt), file is not None, interactive).count(True) != 1:
        raise GenerationError("give `prompt` (once or more), `file` or `interactive`, one of the three")
    if file is None:
        return prompt or []
    with refusing(f"`file` {file} cannot be read", DataError):
        lines = file.read_text(encoding="utf-8").splitlines()
    if not any(map(str.strip, lines)):
        raise DataError(f"`file` {file}: holds no prompt; write one a line")
    return [line for line in lines if line.strip()]


def _tell_expansion(generator: Generator) -> None:
    expansion = generator.expansion
    if expansion is None or not expansion.linears:
        return
    size = f"{expansion.linears} Linears, {expansion.bytes / 1e9:.2f} GB"
    said = f"weights are expanded once for the CPU ({size})"
    if not expansion.done:
        said = f"too little memory to expand the weights for the CPU ({size}): every token expands them anew, slowly"
    typer.echo(f"quantkit: {said}", err=True)


def _answer_all(generator: Generator, prompts: list[str], settings: Settings) -> None:
    from quantkit.jobs.generate import Timing, answer

    asks = generator.chats and not settings.raw
    timing, alone = Timing(), len(prompts) == 1
    shown = False

    def emit(_index: int, piece: str) -> None:
        nonlocal shown
        if alone:
            print_text(piece if shown or asks else prompts[0] + piece)
            shown = True

    try:
        texts = answer(generator, list(prompts), settings, emit, timing)
    except KeyboardInterrupt:
        print_text("\n")
        _tell_times(timing)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if alone:
        print_text("\n")
    for own, text in () if alone else zip(prompts, texts, strict=True):
        print_text(f"{text if asks else own + text}\n")
    _tell_times(timing)


def _converse(generator: Generator, settings: Settings) -> None:
    """Questions from stdin, answers with all that was said before; Ctrl-C ends an answer, or the conversation."""
    from quantkit.jobs.generate import Timing, answer

    said: list[Message] = []
    while True:
        typer.echo("> ", err=True, nl=False)
        try:
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line:
            typer.echo(err=True)
            return
        if not line.strip():
            continue
        said.append({"role": "user", "content": line.rstrip("\n")})
        timing, told = Timing(), _Told()
        with suppress(KeyboardInterrupt):
            answer(generator, [said], settings, told, timing)
        print_text("\n")
        _tell_times(timing)
        said.append({"role": "assistant", "content": "".join(told.pieces)})


class _Told:
    """Prints the pieces of an answer, and keeps them: an answer that is broken off was said, too."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def __call__(self, _index: int, piece: str) -> None:
        self.pieces.append(piece)
        print_text(piece)


def _tell_times(timing: Timing) -> None:
    typer.echo(
        f"quantkit: {timing.tokens} tokens, the first after {timing.first:.3f} s, then "
        f"{timing.tokens_per_second:.1f} tokens/s",
        err=True,
    )
