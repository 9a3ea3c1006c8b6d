import json

import pytest

from deepinfer import SamplingParams
from deepinfer.errors import RequestError
from deepinfer.structured.grammar import (
    MAX_GRAMMAR_CHARACTERS,
    Constraint,
    Grammar,
    read_so_args,
    read_structured_outputs,
)


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": r".\.[.\]].*"}, Grammar("regex", r"[^\n\r]\.[.\]][^\n\r]*")),
        ({"grammar": "root ::= [0-9]"}, Grammar("ebnf", "root ::= [0-9]")),
        ({"choice": ['a"b', "c\n", 'a"b']}, Grammar("ebnf", 'root ::= "a\\"b" | "c\\x0a"')),
        ({"json": {"type": "integer"}}, Grammar("json_schema", '{"type": "integer"}')),
        ({"json": '{"type":"integer"}'}, Grammar("json_schema", '{"type": "integer"}')),
        ({"json_object": True, "regex": None}, Grammar("json_schema", '{"type": "object"}')),
        ({"json_object": False, "regex": "a"}, Grammar("regex", "a")),
    ],
)
def test_forms_become_grammars(form, grammar):
    assert read_structured_outputs(form) == grammar
    assert SamplingParams(structured_outputs=form).constraint == Constraint(grammar)
    assert read_structured_outputs(json.dumps(form)) == grammar == read_structured_outputs(grammar)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("a+", "must be a mapping"),
        ({}, "must have exactly one of json, json_object, .* but has none"),
        ({"regex": "a", "choice": ["b"]}, "but has regex, choice"),
        ({"regexp": "a"}, "has 'regexp'; known are json"),
        ({"regex": ""}, "regex is ''; it must be a text of 1 character"),
        ({"regex": 5}, "regex is 5"),
        ({"regex": "a\0"}, "U.0000"),
        ({"regex": "\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "must have at most 262144"),
        ({"choice": []}, "choice has 0 texts"),
        ({"choice": "yes"}, "choice is 'yes'; it must be a list"),
        ({"choice": [1]}, "choice is 1; it must be a text"),
        ({"json_object": 1}, "json_object is 1; it must be true"),
        ({"json": {"not": {}}}, "json: not at # is not supported"),
        ({"structural_tag": "{"}, "structural_tag is no JSON text"),
        ({"structural_tag": {"a": float("nan")}}, "structural_tag cannot be written as JSON"),
        (
            {"structural_tag": {"format": {"type": "json_schema", "json_schema": {"not": {}}}}},
            "json: not at # is not supported",
        ),
    ],
)
def test_what_cannot_be_a_grammar_is_refused(form, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=form)


def test_so_args_state_trigger_and_bound_token():
    args = {"schema_type": "regex", "schema": "a+", "trigger_token_ids": [5, 6, 7], "bound_token_id": 6}
    constraint = Constraint(Grammar("regex", "a+"), (5, 6, 7), 6)
    assert read_so_args(args) == constraint == SamplingParams(so_args=args).constraint
    assert read_so_args({"schema_type": "json_object"}).grammar == Grammar("json_schema", '{"type": "object"}')
    schema = {"schema_type": "json_schema", "schema": json.dumps({"type": "null"})}
    assert read_so_args(schema) == Constraint(Grammar("json_schema", '{"type": "null"}'))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_type": "xml"}, "schema_type is 'xml'; it must be one of json"),
        ({"schema": None}, "schema is missing"),
        ({"trigger_token_ids": 5}, "trigger_token_ids is 5; it must be a list"),
        ({"trigger_token_ids": [-1]}, "so_args holds -1"),
        ({"trigger_token_ids": list(range(65))}, "has 65 ids; at most 64"),
        ({"bound_token_id": 9}, r"bound_token_id is 9; it must be one of trigger_token_ids \[5, 6\]"),
        ({"extra": 1}, "it must be a mapping with schema_type"),
    ],
)
def test_so_args_that_make_no_sense_are_refused(changes, message):
    args = {"schema_type": "regex", "schema": "a+", "trigger_token_ids": [5, 6], "bound_token_id": None}
    with pytest.raises(RequestError, match=message):
        SamplingParams(so_args=args | changes)


def test_two_grammars_or_a_grammar_that_may_not_end_are_refused():
    form, args = {"regex": "a"}, {"schema_type": "regex", "schema": "a"}
    with pytest.raises(RequestError, match="give one of them"):
        SamplingParams(structured_outputs=form, so_args=args)
    with pytest.raises(RequestError, match="ignore_eos is set"):
        SamplingParams(structured_outputs=form, ignore_eos=True)
