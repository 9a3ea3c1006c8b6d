import numpy as np
import pytest

from deepinfer.checkpoint.hub import BUNDLED
from deepinfer.frontend import known_answers
from deepinfer.frontend.chat import ChatEncoder
from deepinfer.frontend.known_answers import KnownAnswers
from deepinfer.frontend.tokenizer import NoTokenizer

FIRST = "<｜User｜>Hi<｜Assistant｜></think>"
END = "<｜end▁of▁sentence｜>"


def calls(inside):
    invoke = f'<｜DSML｜ invoke name="f">\n{inside}</｜DSML｜ invoke>\n'
    return f"\n\n<｜DSML｜ calls>\n{invoke}</｜DSML｜ calls>"


def call(value):
    return calls(f'<｜DSML｜ parameter name="a" string="false">{value}</｜DSML｜ parameter>\n')


@pytest.fixture
def known(tokenizer):
    return KnownAnswers(tokenizer, ChatEncoder(BUNDLED / "tokenizer.json").parser)


def spelled_out(tokenizer, text):
    """The text in the smallest tokens that there are."""
    return [token for character in text for token in tokenizer.encode(character)]


def test_an_answer_comes_back_in_the_tokens_it_was_made_of(tokenizer, known):
    first = tokenizer.encode(FIRST)
    answer = [*spelled_out(tokenizer, "Hello there"), *tokenizer.encode(END)]
    known.add(np.array(first, np.int32), answer)
    second = tokenizer.encode(FIRST + "Hello there" + END + FIRST)
    assert second[: len(first) + len(answer)] != first + answer
    assert known.restored(second) == first + answer + first

    another = [*spelled_out(tokenizer, "Bye"), *tokenizer.encode(END)]
    known.add(np.array(first + answer + first, np.int32), another)
    third = tokenizer.encode(FIRST + "Hello there" + END + FIRST + "Bye" + END + FIRST)
    assert known.restored(third) == first + answer + first + another + first


@pytest.mark.parametrize("text", ["Hello you", "Hello there "])
def test_another_text_or_another_prompt_is_left_alone(tokenizer, known, text):
    first = tokenizer.encode(FIRST)
    known.add(np.array(first, np.int32), [*spelled_out(tokenizer, "Hello there"), *tokenizer.encode(END)])
    for prompt in (FIRST + text + END + FIRST, "a" + FIRST + "Hello there" + END, FIRST, FIRST + "Hello there"):
        ids = tokenizer.encode(prompt)
        assert known.restored(ids) == ids


@pytest.mark.parametrize("opening", ["<think>", "</think>"])
@pytest.mark.parametrize(
    ("written", "sent_back", "is_same"),
    [
        (call("[1,2]"), call("[1, 2]"), True),
        (call('{"b":1,  "a":2}'), call('{"b": 1, "a": 2}'), True),
        (calls(""), calls("\n"), True),
        (call("[1,2]"), call("[1, 3]"), False),
        (call("[1,2]"), "\n\nWell." + call("[1, 2]"), False),
        ("[1,2]", "[1, 2]", False),
    ],
)
def test_calls_that_mean_the_same_come_back_as_they_were_written(
    tokenizer, known, opening, written, sent_back, is_same
):
    first = tokenizer.encode("<｜User｜>Hi<｜Assistant｜>" + opening)
    before = "I call.</think>" if opening == "<think>" else ""
    answer = tokenizer.encode(before + written + END)
    known.add(np.array(first, np.int32), answer)
    second = first + tokenizer.encode(before + sent_back + END)
    assert known.restored(second) == (first + answer if is_same else second)


def test_answers_come_back_under_their_own_salt_alone(tokenizer, known):
    first, answer = tokenizer.encode(FIRST), [*spelled_out(tokenizer, "Hello"), *tokenizer.encode(END)]
    known.add(np.array(first, np.int32), answer, "mine")
    second = tokenizer.encode(FIRST + "Hello" + END)
    assert known.restored(second, "mine") == first + answer
    assert known.restored(second) == known.restored(second, "other") == second


def test_only_answers_that_ended_by_themselves_are_remembered(tokenizer, known, monkeypatch):
    first, end = tokenizer.encode(FIRST), tokenizer.encode(END)
    known.add(np.array(first, np.int32), spelled_out(tokenizer, "Hello"))
    known.add(np.array(tokenizer.encode("Hi"), np.int32), end)
    assert not known._answers
    monkeypatch.setattr(known_answers, "MAX_TOKENS", 10)
    for number in range(8):
        known.add(np.array([number, *first], np.int32), [5, 5, *end])
    assert len(known._answers) == 3 and known._num_tokens == 9


def test_without_a_tokenizer_nothing_is_remembered():
    known = KnownAnswers(NoTokenizer(), ChatEncoder(BUNDLED / "tokenizer.json").parser)
    known.add(np.array([1, 2], np.int32), [3])
    assert known.restored([1, 2, 3]) == [1, 2, 3]
