"""What masks say: exactly the tokens that go on with the grammar, and its end exactly where it can end."""

import re

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.structured.grammar import read_structured_outputs
from deepinfer.structured.xgrammar_library import XGrammar
from grammar_walker import EOS


def tokens(text):
    return [ord(character) for character in text]


def test_the_end_is_allowed_exactly_when_the_grammar_can_end(walker):
    matcher = walker.matcher({"regex": "ab?"})
    assert walker.allowed(matcher).tolist() == tokens("a") and not matcher.is_complete
    matcher.accept(ord("a"))
    assert walker.allowed(matcher).tolist() == [ord("b"), EOS] and matcher.is_complete
    matcher.accept(ord("b"))
    assert walker.allowed(matcher).tolist() == [EOS] and matcher.is_complete and not matcher.is_ended
    assert matcher.accept(EOS) and matcher.is_ended


def test_a_forbidden_token_changes_nothing(walker):
    matcher = walker.matcher({"choice": ["yes", "no"]})
    assert not matcher.accept(ord("x")) and matcher.accept(ord("n"))
    assert walker.allowed(matcher).tolist() == [ord("o")]


def test_rollback_equals_never_having_accepted(walker):
    """Through an end, a character of several bytes, and any number of tokens."""
    text = list('{"é": [1, {"a": "퀀"}]}'.encode()) + [EOS]
    matcher = walker.matcher({"json_object": True})
    masks = []
    for token in text:
        masks.append(walker.allowed(matcher).tolist())
        assert matcher.accept(token)
    random = np.random.default_rng(0)
    position = len(text)
    for _ in range(40):
        count = int(random.integers(0, position + 1))
        matcher.rollback(count)
        position -= count
        assert matcher.is_ended == (position == len(text))
        for token in text[position : position + int(random.integers(0, 8))]:
            assert walker.allowed(matcher).tolist() == masks[position]
            assert matcher.accept(token)
            position += 1


@pytest.mark.parametrize("form", [{"regex": "..."}, {"json": {"type": "string"}}, {"grammar": "root ::= [^a]*"}])
def test_no_surrogate_can_be_spelled(walker, form):
    matcher = walker.matcher(form)
    start = [ord('"')] if "json" in form else []
    assert all(matcher.accept(token) for token in [*start, 0xED])
    assert walker.allowed(matcher).tolist() == list(range(0x80, 0xA0))
    matcher.rollback(1)
    assert matcher.accept(0xEC)
    assert walker.allowed(matcher).tolist() == list(range(0x80, 0xC0))


@pytest.mark.parametrize("bounds", [{}, {"minLength": 1}, {"maxLength": 3}, {"minLength": 1, "maxLength": 2}])
def test_control_characters_are_never_part_of_a_json_string(walker, bounds):
    matcher = walker.matcher({"json": {"type": "string", **bounds}})
    assert matcher.accept(ord('"'))
    assert (walker.allowed(matcher) >= 32).all()


def test_batches_give_what_single_calls_give(walker):
    forms = [{"regex": "[0-9]+"}, {"choice": ["yes", "no"]}, {"json_object": True}, {"regex": "7é"}]
    single, batch = ([walker.matcher(form) for form in forms] for _ in range(2))
    drawn = [ord("7"), ord("y"), ord("{"), ord("7")]
    assert all(
        matcher.accept(token) for matchers in (single, batch) for matcher, token in zip(matchers, drawn, strict=True)
    )
    masks = np.zeros((2, 6, walker.library.num_words), dtype=np.int32)
    rows = [4, 0, 1, 5]
    walker.library.fill_all(batch, masks[0], rows)
    for row, matcher in zip(rows, single, strict=True):
        matcher.fill(masks[1], row)
    assert (masks[0] == masks[1]).all()


def test_tokens_without_text_and_padded_ids_are_never_allowed(capfd):
    library = XGrammar([b"a", b"", b"b", b"ab"], 40, [1])
    matcher = library.matcher(library.load(library.compile(read_structured_outputs({"regex": "[^x]*"}))))
    masks = np.full((1, 2), -1, dtype=np.int32)
    matcher.fill(masks, 0)
    assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == [0, 1, 2, 3]
    library = XGrammar([b"a", b"", b"", b"ab"], 40, [1])
    matcher = library.matcher(library.load(library.compile(read_structured_outputs({"regex": "[^x]*"}))))
    assert [matcher.accept(token) for token in (2, 4, 39, 3)] == [False, False, False, True]
    assert not matcher.accept(2) and matcher.accept(1)
    assert capfd.readouterr().err == ""  # drafts may be such tokens; what xgrammar writes is not for users


REGEXES = [
    r"[a-z]{2,5}(-[0-9]+)?", r"(foo|ba+r)?(baz|qu+x)", r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", r"^a*b+c{2}$",
    r"(?:ab)+?c", r"[^\n]{3}", r"\d{4}-\d{2}-\d{2}", r"[\w.]+@[\w]+\.(com|org)", r"(a|b|)c", r"é[à-ü]+", r"(a?){5}a{5}",
    r"((a+)?b)?c", r"\x41\u0042\.\\\[\]", r"[^-a-c]{2}", r".{2,5}", r"[.]\.(.|x)?",
]  # fmt: skip


@pytest.mark.parametrize("regex", REGEXES)
def test_random_answers_under_a_regex_match_it(walker, regex):
    texts = walker.texts({"regex": regex}, count=30)
    assert texts and all(re.fullmatch(regex, text) for text in texts), texts


def test_expressions_of_random_depth_are_well_formed(walker):
    grammar = 'root ::= term (("+" | "*") term)*\nterm ::= [1-9] [0-9]? | "(" root ")"'
    texts = walker.texts({"grammar": grammar}, count=40)
    assert any("(" in text for text in texts) and all(isinstance(eval(text), int) for text in texts)  # noqa: S307


def test_choices_are_all_there_is(walker):
    choices = ["yes", "no", 'a "quoted"\n\\ text', "é"]
    assert set(walker.texts({"choice": choices}, count=60)) == set(choices)


def test_structural_tags_hold_their_schemas(walker):
    tag = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 22]}}}
    form = {"structural_tag": {"type": "structural_tag", "format": {**tag, "end": "</f>"}}}
    assert walker.accepts(form, "<f>22</f>") and not walker.accepts(form, "<f>3</f>")
    form["structural_tag"]["format"]["content"]["json_schema"] = {"type": "object"}
    assert walker.accepts(form, "<f>{" + " " * 16 + "}</f>") and not walker.accepts(form, "<f>{" + " " * 17 + "}</f>")


@pytest.mark.parametrize("form", [{"structural_tag": "{}"}, {"structural_tag": {"type": "structural_tag"}}])
def test_a_wrong_structural_tag_is_refused(walker, form):
    with pytest.raises(RequestError, match="structural_tag cannot be compiled"):
        walker.compiled(form)
