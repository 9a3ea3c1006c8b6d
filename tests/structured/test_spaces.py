"""Spaces between the parts of a JSON text: few are always allowed, many never, those in strings are not counted."""

import json

import numpy as np
import pytest

from deepinfer.structured.grammar import MAX_SPACES, read_structured_outputs
from deepinfer.structured.spaces import ESCAPED, IN_STRING, SpaceLimit
from deepinfer.structured.xgrammar_library import XGrammar

PARTS = [b"{}", b'{"', b'":', b'": "', b'",\n', b'"}', b'"]', b'\\"', b"\\", b'", "', b"\t\n", b'":\n']
RUNS = [b" " * count for count in (2, 3, 8, 16, 17, 40)] + [b'"' + b" " * 20, b" " * 20 + b'"', b'"}' + b"\n" * 17]
VOCABULARY = [bytes([byte]) for byte in range(256)] + [b""] + PARTS + RUNS
EOS = 256


@pytest.fixture(scope="module")
def library():
    return XGrammar(VOCABULARY, len(VOCABULARY) + 3, [EOS])


def matcher(library, form):
    return library.matcher(library.load(library.compile(read_structured_outputs(form))))


def cut(text, random):
    """Random tokens that spell a text."""
    tokens = []
    while text:
        fitting = [token for token, spelling in enumerate(VOCABULARY) if spelling and text.startswith(spelling)]
        tokens.append(int(random.choice(fitting)))
        text = text[len(VOCABULARY[tokens[-1]]) :]
    return tokens


def is_allowed(library, matcher, token):
    masks = np.zeros((1, library.num_words), dtype=np.int32)
    matcher.fill(masks, 0)
    return bool(masks[0, token // 32] >> (token % 32) & 1)


def follow(library, matcher, tokens):
    """How many tokens are taken; masks and `accept` say the same of each."""
    for count, token in enumerate(tokens):
        expected = is_allowed(library, matcher, token)
        assert matcher.accept(token) == expected
        if not expected:
            return count
    return len(tokens)


def spaced(value, random, most):
    """A JSON text of a value with up to `most` spaces wherever some may be."""
    spaces = lambda: "".join(random.choice(list(" \n\t"), random.integers(0, most + 1)))  # noqa: E731
    if isinstance(value, dict):
        items = [f"{json.dumps(name)}{spaces()}:{spaces()}{spaced(one, random, most)}" for name, one in value.items()]
    elif isinstance(value, list):
        items = [spaced(one, random, most) for one in value]
    else:
        return json.dumps(value)
    begin, end = "{}" if isinstance(value, dict) else "[]"
    if not items:
        return begin + spaces() + end
    return begin + spaces() + f"{spaces()},{spaces()}".join(items) + spaces() + end


def values(random, depth=0):
    kind = random.integers(0, 6 if depth < 3 else 4)
    if kind < 4:
        return [7, None, ' "\\' + " " * 30 + "\n", " " * int(random.integers(0, 40)) + "x"][kind]
    count = int(random.integers(0, 4))
    if kind == 4:
        return [values(random, depth + 1) for _ in range(count)]
    return {f"k{i}" + " " * 20 * (i % 2): values(random, depth + 1) for i in range(count)}


def test_every_text_with_few_spaces_is_allowed_however_it_is_cut_into_tokens(library):
    random = np.random.default_rng(0)
    for _ in range(60):
        text = spaced({"a": values(random), "b": [values(random)]}, random, MAX_SPACES).encode()
        one = matcher(library, {"json_object": True})
        tokens = cut(text, random)
        assert follow(library, one, tokens) == len(tokens) and one.is_complete, text


@pytest.mark.parametrize(
    "text", ["{%s}", '{"a"%s: 1}', '{"a":%s1}', '{"a": [1%s, 2]}', '{"a": [1,%s2]}', '{"a": ""%s}']
)
def test_a_run_is_refused_at_the_token_that_makes_it_too_long(library, text):
    random = np.random.default_rng(1)
    before, after = (part.encode() for part in text.split("%s"))
    for count, is_taken in [(MAX_SPACES, True), (MAX_SPACES + 1, False), (60, False)]:
        for _ in range(10):
            tokens = cut(before + b" " * count + after, random)
            taken = follow(library, matcher(library, {"json_object": True}), tokens)
            assert (taken == len(tokens)) == is_taken
            if not is_taken:
                lengths = np.cumsum([len(VOCABULARY[token]) for token in tokens])
                assert taken == int(np.searchsorted(lengths, len(before) + MAX_SPACES, side="right"))


def test_what_was_rolled_back_is_not_counted(library):
    one = matcher(library, {"json_object": True})
    assert follow(library, one, [ord("{"), VOCABULARY.index(b" " * 16)]) == 2
    assert not one.accept(ord(" "))
    one.rollback(1)
    assert follow(library, one, [ord(" "), VOCABULARY.index(b" " * 8), ord("}")]) == 3


def test_a_refused_token_changes_nothing(library):
    """Spaces are counted behind the grammar's own check, which is taken back."""
    one = matcher(library, {"json_object": True})
    assert follow(library, one, [ord("{"), ord(" ")]) == 2
    assert not one.accept(VOCABULARY.index(b" " * 16)) and not one.accept(VOCABULARY.index(b" " * 17))
    assert follow(library, one, [VOCABULARY.index(b" " * 8), ord("}"), EOS]) == 3 and one.is_ended


def test_filling_writes_every_word_whatever_was_there(library):
    forms = [{"json_object": True}, {"regex": ".*"}, {"grammar": 'root ::= [^a]* "b"'}]
    rows = [matcher(library, form) for form in forms]
    masks = np.stack([np.zeros((3, library.num_words), np.int32), np.full((3, library.num_words), -1, np.int32)])
    for some in masks:
        library.fill_all(rows, some, [0, 1, 2])
    assert (masks[0] == masks[1]).all()


def test_states_follow_quotes_and_escapes():
    limit = SpaceLimit(VOCABULARY, -(-len(VOCABULARY) // 32), 3)
    texts = [b'"', b"\\", b'"', b" " * 40, b'"', b"\t\n", b" ", b"{}"]
    state, seen = 0, []
    for text in texts:
        state = limit.after(state, VOCABULARY.index(text))
        seen.append(state)
    assert seen == [IN_STRING, ESCAPED, IN_STRING, IN_STRING, 0, 2, 3, 0]
    assert limit.after(3, ord(" ")) is None and limit.after(2, VOCABULARY.index(b"\t\n")) is None
