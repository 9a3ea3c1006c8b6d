import pytest

from deepinfer.errors import RequestError
from deepinfer.frontend.bad_words import bad_word_ids
from deepinfer.frontend.tokenizer import NoTokenizer


def test_a_word_is_taken_with_and_without_a_space_before_it(tokenizer):
    for word in ("capital", " capital"):
        sequences = bad_word_ids([word], tokenizer, 4096)
        assert [tokenizer.decode(list(ids)) for ids in sequences] == ["capital", " capital"]
    assert all(len(ids) <= len("capital") for ids in sequences)


def test_a_spaced_form_that_ends_with_the_plain_one_is_left_out(tokenizer):
    comma = tuple(tokenizer.encode(","))
    assert tuple(tokenizer.encode(" ,"))[-1:] == comma, "this tokenizer has no token for the two"
    assert bad_word_ids([",", ","], tokenizer, 4096) == (comma,)


def test_a_prompt_s_first_token_is_none_of_a_word_s(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "bos_id", 0)
    assert tokenizer.encode("a")[0] == 0
    assert all(0 not in ids for ids in bad_word_ids(["a"], tokenizer, 4096))


@pytest.mark.parametrize(
    ("word", "vocab_size", "message"),
    [
        ("x1" * 100, 4096, r"bad_words holds 'x1.*, which has \d+ tokens; at most 32 are taken"),
        ("capital", 10, "bad_words holds 'capital', which this model cannot write"),
        ("a\ud800", 4096, "a text holds a lone surrogate"),
    ],
)
def test_words_that_cannot_be_excluded_are_refused(tokenizer, word, vocab_size, message):
    with pytest.raises(RequestError, match=message):
        bad_word_ids([word], tokenizer, vocab_size)


def test_words_need_a_tokenizer():
    assert bad_word_ids([], NoTokenizer(), 640) == ()
    with pytest.raises(RequestError, match="a parameter holds the text 'x', but this model has no tokenizer"):
        bad_word_ids(["x"], NoTokenizer(), 640)
