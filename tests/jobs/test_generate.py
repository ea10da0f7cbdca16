"""The generate job: one prompt and several, stop texts, drawing, conversations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.errors import GenerationError
from quantkit.jobs.generate import Answer, Generator, Settings, Timing, answer, open_generator
from quantkit.runtime.sampling import Sampling

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
PROMPTS = ["the model reads", "it", "every word that came before it and then"]


def generator_of(tiny_model: Callable[[str], Path], family: str = "llama") -> Generator:
    return open_generator(str(tiny_model(family)), "cpu")


def texts_of(generator: Generator, prompts: list[str], settings: Settings) -> list[str]:
    return answer(generator, prompts, settings, lambda _index, _piece: None)


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_greedy_text_is_that_of_transformers(tiny_model: Callable[[str], Path], family: str) -> None:
    generator = generator_of(tiny_model, family)
    ids = generator.tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    tokens = generator.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    expected = generator.tokenizer.decode(tokens, skip_special_tokens=True)
    assert texts_of(generator, PROMPTS[:1], Settings(12)) == [expected]


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt2"])
def test_several_prompts_get_the_answers_that_each_gets_alone(tiny_model: Callable[[str], Path], family: str) -> None:
    generator = generator_of(tiny_model, family)
    alone = [texts_of(generator, [prompt], Settings(12))[0] for prompt in PROMPTS]
    assert texts_of(generator, PROMPTS, Settings(12)) == alone


def test_pieces_add_up_to_the_text_and_stop_before_the_stop_text(tiny_model: Callable[[str], Path]) -> None:
    generator = generator_of(tiny_model)
    whole = texts_of(generator, PROMPTS[:1], Settings(24))[0]
    stop, pieces = whole[6:9], []
    assert stop.strip()
    timing = Timing()
    text = answer(generator, PROMPTS[:1], Settings(24, stop=(stop,)), lambda _, piece: pieces.append(piece), timing)[0]
    assert "".join(pieces) == text == whole[: whole.find(stop)]
    assert 0 < timing.tokens < 24
    assert 0 < timing.first <= timing.seconds


def test_half_a_stop_text_is_held_back_until_it_is_none() -> None:
    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    growing = Answer(Letters(), ("abc",), frozenset())
    assert [growing.add(ord(letter)) for letter in "xabdab"] == ["x", "", "", "abd", "", ""]
    assert growing.rest() == "ab"
    assert not growing.done


def test_drawing_repeats_by_its_seed(tiny_model: Callable[[str], Path]) -> None:
    generator = generator_of(tiny_model)
    first, again, other = (
        texts_of(generator, PROMPTS[:1], Settings(12, Sampling(temperature=2.0, seed=seed))) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_chat_template_is_used_unless_raw(tiny_model: Callable[[str], Path]) -> None:
    generator = generator_of(tiny_model)
    generator.tokenizer.chat_template = CHAT
    asked = texts_of(generator, ["the model"], Settings(8))
    assert asked == texts_of(generator, ["user: the model\nassistant:"], Settings(8, raw=True))
    assert asked != texts_of(generator, ["the model"], Settings(8, raw=True))


def test_padding_that_reaches_nothing_leaves_no_trace(tiny_model: Callable[[str], Path]) -> None:
    generator = generator_of(tiny_model)
    long = " ".join(PROMPTS)
    assert texts_of(generator, [long, "a"], Settings(8))[1] == texts_of(generator, ["a"], Settings(8))[0]


def test_an_empty_stop_text_is_refused() -> None:
    with pytest.raises(GenerationError, match="`stop` is an empty text"):
        Settings(stop=("",))
