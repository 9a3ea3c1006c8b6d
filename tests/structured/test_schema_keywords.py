"""Every keyword of JSON Schema 2020-12: enforced, a mere annotation, or refused by name; none is ignored."""

import json

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from deepinfer.errors import RequestError
from deepinfer.structured.json_schema import ANNOTATIONS, checked_schema

INTEGER = {"type": "integer"}
META = "https://json-schema.org/draft/2020-12/meta/"
VOCABULARIES = ("core", "applicator", "unevaluated", "validation", "meta-data", "format-annotation", "content")
DECLARED = [name for part in VOCABULARIES for name in REGISTRY.contents(META + part)["properties"]]

# keyword: (schema with it, a text that it allows, a text that it alone forbids)
ENFORCED = {
    "$ref": ({"$defs": {"a": INTEGER}, "$ref": "#/$defs/a"}, "1", '"x"'),
    "$defs": ({"$defs": {"a": INTEGER}, "$ref": "#/$defs/a"}, "1", '"x"'),
    "prefixItems": ({"type": "array", "prefixItems": [INTEGER]}, "[1]", '["x"]'),
    "items": ({"type": "array", "items": INTEGER}, "[1, 2]", '[1, "x"]'),
    "properties": ({"type": "object", "properties": {"a": INTEGER}}, '{"a": 1}', '{"a": "x"}'),
    "additionalProperties": ({"type": "object", "additionalProperties": INTEGER}, '{"b": 1}', '{"b": "x"}'),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^k$"}}, '{"k": 1}', '{"j": 1}'),
    "anyOf": ({"anyOf": [INTEGER, {"type": "null"}]}, "null", '"x"'),
    "oneOf": ({"oneOf": [INTEGER, {"type": "null"}]}, "1", '"x"'),
    "allOf": ({"allOf": [{"type": "integer", "minimum": 3}]}, "4", "2"),
    "type": (INTEGER, "1", '"x"'),
    "const": ({"const": [1]}, "[1]", "[2]"),
    "enum": ({"enum": [1, "x"]}, '"x"', '"y"'),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, "14", "15"),
    "maximum": ({"type": "integer", "maximum": 12}, "12", "13"),
    "exclusiveMaximum": ({"type": "integer", "exclusiveMaximum": 12}, "11", "12"),
    "minimum": ({"type": "integer", "minimum": 12}, "12", "11"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 12}, "13", "12"),
    "maxLength": ({"type": "string", "maxLength": 2}, '"ab"', '"abc"'),
    "minLength": ({"type": "string", "minLength": 2}, '"ab"', '"a"'),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1, 2]"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 1}'),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a": 1}', "{}"),
    "required": ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, '{"a": 1}', "{}"),
    "format": ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False}, "[1]", "[1, 2]",
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": INTEGER}, "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}',
    ),
}  # fmt: skip
REFUSED = {
    "$anchor": "q", "$dynamicRef": "#q", "$dynamicAnchor": "q", "$vocabulary": {META + "core": True},
    "contains": INTEGER, "patternProperties": {"^s": INTEGER}, "dependentSchemas": {"a": {"required": ["b"]}},
    "if": INTEGER, "then": INTEGER, "else": INTEGER, "not": INTEGER, "uniqueItems": True, "maxContains": 2,
    "minContains": 2, "dependentRequired": {"a": ["b"]}, "contentEncoding": "base64",
    "contentMediaType": "application/json", "contentSchema": INTEGER,
}  # fmt: skip
TYPES = ({}, INTEGER, {"type": "string"}, {"type": "array"}, {"type": "object"}, {"type": ["object", "array"]})


def test_every_keyword_of_the_standard_is_in_one_table() -> None:
    annotations = [name for name in ANNOTATIONS if name in DECLARED]
    assert sorted([*ENFORCED, *REFUSED, *annotations]) == sorted(DECLARED) and len(DECLARED) > 55


@pytest.mark.parametrize("keyword", ENFORCED)
def test_an_enforced_keyword_forbids_what_the_standard_does(walker, keyword: str) -> None:
    schema, allowed, forbidden = ENFORCED[keyword]
    standard = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    assert keyword in schema
    assert [standard.is_valid(json.loads(text)) for text in (allowed, forbidden)] == [True, False]
    assert [walker.accepts({"json": schema}, text) for text in (allowed, forbidden)] == [True, False]


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("nesting", ["root", "property", "item", "branch", "definition"])
def test_another_keyword_is_refused_by_name_and_path_beside_every_type(keyword: str, nesting: str) -> None:
    for kind in TYPES:
        if keyword == "uniqueItems" and kind and "array" not in kind["type"]:
            continue  # it says nothing about other types
        inner = {**kind, keyword: REFUSED[keyword]}
        schema, path = {
            "root": (inner, "#"),
            "property": ({"type": "object", "properties": {"p": inner}}, "#/properties/p"),
            "item": ({"type": "array", "items": inner}, "#/items"),
            "branch": ({"anyOf": [INTEGER, inner]}, "#/anyOf/1"),
            "definition": ({"$defs": {"d": inner}, "$ref": "#/$defs/d"}, "#/$defs/d"),
        }[nesting]
        with pytest.raises(RequestError) as refusal:
            checked_schema(schema)
        assert str(refusal.value).startswith(f"json: {keyword} at {path} "), (schema, str(refusal.value))


@pytest.mark.parametrize("keyword", ["discriminator", "minimun", "xml", "$recursiveRef", "divisibleBy"])
def test_words_that_are_no_keywords_are_refused_too(keyword: str) -> None:
    with pytest.raises(
        RequestError, match=f"json: \\{keyword} at # is not supported" if keyword[0] == "$" else keyword
    ):
        checked_schema({"type": "integer", keyword: 1})
