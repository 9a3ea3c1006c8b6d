import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.frontend.detokenizer import Detokenizer, TokenTexts

# Beginnings and parts of characters, of overlong forms, surrogates and values past U+10FFFF.
NASTY = [
    b"\xed",
    b"\xa0",
    b"\xe2",
    b"\x82",
    b"\xf0",
    b"\x9f",
    b"\x98",
    b"\xf4",
    b"\x90",
    b"\xe0",
    b"\x80",
    b"\xc3",
    b"a",
]


def byte_detokenizer(*tokens: bytes) -> Detokenizer:
    """A vocabulary of these byte strings; the id is the place in the list."""
    return Detokenizer(TokenTexts(lambda token_id: tokens[token_id]))


def test_every_single_id_decodes_as_the_tokenizer_says(tokenizer):
    for token_id in range(4096):
        detokenizer = tokenizer.detokenizer()
        assert detokenizer.add(token_id) + detokenizer.flush() == tokenizer.decode([token_id])


@settings(max_examples=300)
@given(ids=st.lists(st.one_of(st.integers(0, 4099), st.integers(3, 260), st.integers(4072, 4095)), max_size=40))
def test_random_ids_decode_as_the_whole_sequence(tokenizer, ids):
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


@settings(max_examples=200)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
def test_text_comes_back_without_broken_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_last_byte():
    detokenizer = byte_detokenizer(b"\xe2\x82", b"\xac", b"x")
    assert [detokenizer.add(token) for token in (0, 1, 2)] == ["", "€", "x"]
    assert detokenizer.starts == [0, 0, 1]
    assert detokenizer.flush() == ""


def test_a_broken_character_is_replaced_once_and_belongs_to_the_broken_token():
    detokenizer = byte_detokenizer(b"\xe2\x82", b"x")
    assert [detokenizer.add(token) for token in (0, 1)] == ["", "\ufffdx"]
    assert detokenizer.starts == [0, 1]


def test_flush_gives_what_is_left():
    detokenizer = byte_detokenizer(b"a\xf0\x9f\x98")
    assert detokenizer.add(0) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@settings(max_examples=300)
@given(tokens=st.lists(st.one_of(st.binary(min_size=1, max_size=4), st.sampled_from(NASTY)), max_size=12))
@example(tokens=[b"\xed", b"\xa0"])
@example(tokens=[b"\xed\xa0", b"\x80", b"\xf4", b"\x90", b"\xe0", b"\x80"])
def test_starts_say_which_character_a_token_first_touches(tokens):
    detokenizer = byte_detokenizer(*tokens)
    text = "".join(map(detokenizer.add, range(len(tokens)))) + detokenizer.flush()
    assert text == b"".join(tokens).decode("utf-8", "replace")
    owner = characters_of_bytes(b"".join(tokens))
    offsets = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    assert detokenizer.starts == [owner[offset] for offset in offsets]


def characters_of_bytes(data: bytes) -> list[int]:
    """For each byte the index of the character that it is a part of."""
    owner: list[int] = []
    while len(owner) < len(data):
        owner += [owner[-1] + 1 if owner else 0] * first_part(data[len(owner) :])
    return owner


def first_part(data: bytes) -> int:
    """Bytes of the first character, or of the first maximal bad part."""
    try:
        good = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start == 0:
            return error.end
        good = data[: error.start].decode("utf-8")
    return len(good[0].encode("utf-8"))


def test_speed_is_about_a_microsecond_a_token(tokenizer):
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 300)
    detokenizer = tokenizer.detokenizer()
    [detokenizer.add(token_id) for token_id in ids]
    best = min(timed(lambda: [detokenizer.add(token_id) for token_id in ids], time.thread_time) for _ in range(5))
    assert best / len(ids) < 5e-6  # about 0.2 us on an idle core; the rest is room for busy machines


def timed(call, clock) -> float:
    start = clock()
    call()
    return clock() - start


@pytest.mark.parametrize("token_id", [4096, 10**6])
def test_ids_of_a_padded_vocabulary_give_no_text(tokenizer, token_id):
    assert tokenizer.detokenizer().add(token_id) == ""
