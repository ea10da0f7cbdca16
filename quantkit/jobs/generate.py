"""The generate job: prompts to answers, text as it comes, one prompt or several at once, or a conversation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantkit.cuda.device import usable_device
from quantkit.errors import GenerationError
from quantkit.integrations.transformers import set_layout
from quantkit.models.loading import first_device, load_model
from quantkit.nn.table import layout_for
from quantkit.runtime.expanded_weights import Expansion, expand_weights
from quantkit.runtime.generation import Runner, new_tokens, runner_for, start
from quantkit.runtime.sampling import Sampling, drawer

Message = dict[str, str]
Prompt = str | list[Message]
Emit = Callable[[int, str], None]
"""Takes the number of a prompt and the next piece of its answer."""
_UNFINISHED = "\ufffd"  # what a character is shown as while tokens of it are to come


@dataclass(frozen=True)
class Settings:
    """max_new_tokens: of each answer. stop: texts before which an answer ends. raw: without the chat template."""

    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    raw: bool = False

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise GenerationError("`stop` is an empty text, before which every answer ends")


@dataclass(frozen=True)
class Generator:
    """A loaded model and what runs it. expansion: of its weights, None on a GPU."""

    model: Any
    tokenizer: Any
    device: torch.device
    expansion: Expansion | None
    runner: Runner

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)


@dataclass
class Timing:
    """tokens: new ones of all answers. at_first: of them, those that came first, after ``first`` seconds.

    seconds: all together.
    """

    tokens: int = 0
    at_first: int = 0
    first: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens behind the first; 0 where there are none."""
        left = self.seconds - self.first
        return (self.tokens - self.at_first) / left if left > 0 else 0.0


@dataclass
class Answer:
    """The text of one answer as its tokens come; the start of a stop text, or of a character, is held back."""

    tokenizer: Any
    stop: tuple[str, ...]
    ends: frozenset[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    done: bool = False

    def add(self, token: int) -> str:
        """The text that a token adds to what can be shown."""
        if token in self.ends:
            self.done = True
            return self.rest()
        self.ids.append(token)
        self.text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        cuts = [place for stop in self.stop if (place := self.text.find(stop)) >= 0]
        if cuts:
            self.text, self.done = self.text[: min(cuts)], True
            return self.rest()
        return self._show(len(self.text) - self._held_back())

    def rest(self) -> str:
        """What was held back, when no more comes."""
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        piece = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece

    def _held_back(self) -> int:
        if self.text.endswith(_UNFINISHED):
            return len(self.text) - len(self.text.rstrip(_UNFINISHED))
        lengths = (length for stop in self.stop for length in range(len(stop) - 1, 0, -1))
        return max(
            (n for n in lengths if any(self.text.endswith(stop[:n]) for stop in self.stop if n < len(stop))), default=0
        )


def open_generator(model: str, device: str | None, sequences: int = 1) -> Generator:
    """Load a model; by default onto a GPU if there is one. On a CPU its weights are expanded where memory allows.

    sequences: that will be answered at once, for which packed weights are put in order on a GPU.
    Raises ModelError, CheckpointError or DeviceError for what cannot be loaded.
    """
    where = usable_device(device or first_device())
    loaded, tokenizer = load_model(
        model, device=where, before_moving=lambda loaded: set_layout(loaded, layout_for(sequences))
    )
    expansion = expand_weights(loaded) if where.type == "cpu" else None
    return Generator(loaded, tokenizer, where, expansion, runner_for(loaded, where))


def answer(
    generator: Generator, prompts: Sequence[Prompt], settings: Settings, emit: Emit, timing: Timing | None = None
) -> list[str]:
    """The answers to some prompts, read at once; ``emit`` gets each piece of text when it is there.

    prompts: texts, or conversations for the chat template. timing: is filled on the way, also where it is interrupted.
    Raises GenerationError for a prompt of no tokens, or one that does not fit.
    """
    ids, padding = _padded([_ids(generator, prompt, settings.raw) for prompt in prompts], generator)
    answers = [Answer(generator.tokenizer, settings.stop, _ends(generator)) for _ in prompts]
    timing = timing or Timing()
    began = time.perf_counter()
    draw = drawer(settings.sampling, generator.device)
    capacity = ids.shape[1] + settings.max_new_tokens
    session = start(generator.model, ids, capacity, runner=generator.runner, padding=padding, draw=draw)
    for tokens in new_tokens(session, settings.max_new_tokens):
        for index, token in enumerate(tokens[:, 0].tolist()):
            if not answers[index].done:
                emit(index, answers[index].add(token))
                timing.tokens += 1
        timing.seconds = time.perf_counter() - began
        if not timing.first:
            timing.first, timing.at_first = timing.seconds, timing.tokens
        if all(each.done for each in answers):
            break
    for index, each in enumerate(answers):
        emit(index, each.rest())
    return [each.text for each in answers]


def _ids(generator: Generator, prompt: Prompt, raw: bool) -> list[int]:
    tokenizer = generator.tokenizer
    if raw or not generator.chats:
        text = prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)
        ids: list[int] = tokenizer(text).input_ids
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    if not ids:
        raise GenerationError("the prompt has no tokens; give some text to continue")
    return ids


def _padded(prompts: Sequence[list[int]], generator: Generator) -> tuple[Tensor, Tensor | None]:
    """Prompts of equal length, shorter ones with ids in front that no token sees; None where all are as long."""
    longest = max(map(len, prompts))
    missing = [longest - len(ids) for ids in prompts]
    rows = [[0] * count + ids for count, ids in zip(missing, prompts, strict=True)]
    padding = torch.tensor(missing, device=generator.device) if any(missing) else None
    return torch.tensor(rows, device=generator.device), padding


def _ends(generator: Generator) -> frozenset[int]:
    """The tokens that end an answer, by the model and by its tokenizer."""
    of_model = generator.model.generation_config.eos_token_id
    several = of_model if isinstance(of_model, list) else [of_model]
    return frozenset(token for token in (*several, generator.tokenizer.eos_token_id) if token is not None)
