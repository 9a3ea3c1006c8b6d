import json

import jsonschema
import pytest

from deepinfer.errors import RequestError
from deepinfer.structured.json_schema import FORMATS, checked_schema

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def obj(**rules):
    return {"type": "object", **rules}


def array(**rules):
    return {"type": "array", **rules}


# keyword, where it stands, schema
REFUSED = [
    ("multipleOf", "#", {"type": "number", "multipleOf": 0.5}),
    ("multipleOf", "#", {"type": ["integer", "number"], "multipleOf": 5}),
    ("multipleOf", "#", {"type": "integer", "multipleOf": 7, "minimum": 10}),
    ("multipleOf", "#", {"type": "integer", "multipleOf": 5000}),
    ("maxLength", "#", {"type": "string", "pattern": "^a+$", "maxLength": 2}),
    ("maxLength", "#", {"type": "string", "format": "email", "maxLength": 9}),
    ("format", "#", {"type": "string", "pattern": "^2", "format": "date"}),
    ("format", "#", {"type": "string", "format": "regex"}),
    ("format", "#/properties/a", obj(properties={"a": {"type": "string", "format": "phone"}})),
    ("pattern", "#", {"type": "string", "pattern": 'a"b'}),
    ("pattern", "#", {"type": "string", "pattern": r"^\\$"}),
    ("pattern", "#", {"type": "string", "pattern": r"^\n$"}),
    ("pattern", "#", {"type": "string", "pattern": r"^\x22$"}),
    ("maxLength", "#", {"maxLength": 2, "maximum": 5}),
    ("uniqueItems", "#/items", array(items=array(uniqueItems=True))),
    ("contains", "#", array(contains=INTEGER)),
    ("minContains", "#", array(minContains=1)),
    ("additionalItems", "#", array(additionalItems=False)),
    ("unevaluatedItems", "#", array(unevaluatedItems=INTEGER)),
    ("maxItems", "#", array(prefixItems=[INTEGER, INTEGER], maxItems=1)),
    ("maxItems", "#", array(maxItems=2**64 - 1)),
    ("minItems", "#", array(minItems=3, maxItems=2)),
    ("maxLength", "#", {"type": "string", "maxLength": 10**6}),
    ("minimum", "#", {"type": "integer", "minimum": 10**30}),
    ("minimum", "#", {"type": "integer", "minimum": 1.5}),
    ("required", "#", obj(properties={"a": INTEGER}, required=["z"])),
    ("required", "#", obj(required=["z"])),
    ("patternProperties", "#", obj(patternProperties={"^s": INTEGER})),
    ("propertyNames", "#", obj(properties={"abc": True}, propertyNames={"maxLength": 2})),
    ("minProperties", "#", obj(additionalProperties=INTEGER, minProperties=2)),
    ("dependentRequired", "#", obj(properties={"a": INTEGER}, dependentRequired={"a": ["b"]})),
    ("dependentSchemas", "#", obj(dependentSchemas={})),
    ("dependencies", "#", obj(dependencies={})),
    ("unevaluatedProperties", "#", obj(unevaluatedProperties=INTEGER)),
    ("not", "#", {"not": INTEGER}),
    ("not", "#/properties/a", obj(properties={"a": {"type": "integer", "not": {"const": 1}}})),
    ("if", "#", {"if": INTEGER, "then": INTEGER}),
    ("then", "#", {"then": INTEGER}),
    ("type", "#", {"type": "integer", "anyOf": [{"minimum": 3}]}),
    ("required", "#", {"required": ["a"], "anyOf": [obj()]}),
    ("allOf", "#", {"allOf": [INTEGER, {"minimum": 3}]}),
    ("anyOf", "#", {"anyOf": []}),
    ("minimum", "#", {"$defs": {"x": INTEGER}, "$ref": "#/$defs/x", "minimum": 3}),
    ("$ref", "#", {"$ref": "#"}),
    ("$ref", "#", {"$ref": "http://example.org/x"}),
    ("$ref", "#", {"$ref": "#/$defs/none"}),
    ("$ref", "#/$defs/a", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("$ref", "#", {"anyOf": [{"$ref": "#"}, INTEGER]}),
    ("$anchor", "#/$defs/x", {"$defs": {"x": {"$anchor": "q", **INTEGER}}, "$ref": "#/$defs/x"}),
    ("$dynamicRef", "#", {"$dynamicRef": "#x"}),
    ("contentEncoding", "#", {"type": "string", "contentEncoding": "base64"}),
    ("minimum", "#", {"minimum": 3, "enum": [1, 5]}),
    ("enum", "#", {"type": "string", "enum": [1, 2]}),
    ("type", "#", {"type": "foo"}),
    ("type", "#", {"type": []}),
]


@pytest.mark.parametrize(("keyword", "path", "schema"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_rules_that_would_be_ignored_are_refused_by_keyword_and_path(keyword, path, schema):
    with pytest.raises(RequestError) as refusal:
        checked_schema(schema)
    assert str(refusal.value).startswith(f"json: {keyword} at {path} ")


@pytest.mark.parametrize("schema", ["{", 5, [], None, False, "[]", {"a": float("nan"), "title": float("nan")}])
def test_what_is_no_schema_is_refused(schema):
    with pytest.raises(RequestError, match="^json"):
        checked_schema(schema)


def test_deep_nesting_is_refused():
    schema = {"type": "integer"}
    for _ in range(100):
        schema = array(items=schema)
    with pytest.raises(RequestError, match="nested deeper than 64"):
        checked_schema(schema)
    with pytest.raises(RequestError, match="json"):
        checked_schema('{"items":' * 50_000 + "true" + "}" * 50_000)


def test_many_references_are_followed_once():
    """2^60 paths lead through this schema."""
    refs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(60)}
    checked_schema({"$defs": {**refs, "d60": INTEGER}, "$ref": "#/$defs/d0"})


ENFORCED = [
    INTEGER,
    True,
    {"type": "integer", "minimum": -5, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "pattern": r"^[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?$"},
    {"type": "string", "pattern": r"^[)?]{2}\)?(xa*)?$"},
    {"type": "number"},
    {"type": "number", "minimum": 1.5, "maximum": 3.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": -1000},
    {"type": "number", "maximum": 0.001},
    STRING,
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-z]{2,5}(-[0-9]+)?$"},
    {"type": "string", "pattern": "x"},
    {"type": "string", "pattern": "^a|b$"},
    {"type": "string", "pattern": r"^[^a]\S\D.$"},
    *({"type": "string", "format": name} for name in FORMATS),
    {"enum": ["a", 1, None, {"b": [1.5, True]}, 'q"\\\né']},
    {"type": "string", "enum": ["a", 1]},
    {"type": ["integer", "null"], "enum": [1, 2.0, None, True, "a"]},
    {"const": {"a": [1]}},
    {"type": ["string", "integer"], "maximum": 5, "minimum": 0, "maxLength": 2},
    {"maxLength": 2},
    {"maximum": 5},
    {"properties": {"a": INTEGER}, "required": ["a"]},
    {"items": INTEGER},
    array(items=INTEGER, minItems=1, maxItems=3),
    array(minItems=1, maxItems=2),
    array(items=STRING, maxItems=3, uniqueItems=False),
    array(prefixItems=[INTEGER, STRING], items=False),
    array(prefixItems=[INTEGER], items=STRING, maxItems=3),
    array(prefixItems=[INTEGER], maxItems=3),
    array(prefixItems=[INTEGER], unevaluatedItems=False, maxItems=3),
    array(unevaluatedItems=False),
    array(maxItems=2),
    array(prefixItems=[INTEGER, STRING], minItems=2),
    obj(),
    obj(properties={"a": INTEGER, "b": STRING}, required=["b"], additionalProperties=False),
    obj(properties={"a": INTEGER, "b": STRING}),
    obj(properties={"a": INTEGER}, additionalProperties=INTEGER, maxProperties=2),
    obj(additionalProperties=INTEGER, minProperties=1, maxProperties=3),
    obj(properties={"a": INTEGER, "b": INTEGER, "c": INTEGER}, minProperties=2, maxProperties=2),
    obj(unevaluatedProperties=False),
    obj(maxProperties=2),
    obj(propertyNames={"pattern": "^k[0-9]$"}, minProperties=1, maxProperties=2),
    obj(minProperties=1, maxProperties=2),
    obj(propertyNames={"pattern": "^k[0-9]$"}),
    obj(propertyNames={"enum": ["x", "y"]}, additionalProperties=INTEGER),
    obj(properties={'a"b': INTEGER, "é/~": STRING}, required=['a"b'], unevaluatedProperties=False),
    {"anyOf": [INTEGER, {"type": "string", "maxLength": 3}]},
    {"oneOf": [INTEGER, STRING]},
    {"allOf": [{"type": "integer", "minimum": 3}]},
    {"$defs": {"x": {"type": "integer", "maximum": 3}}, "$ref": "#/$defs/x"},
    {"definitions": {"a/b c": INTEGER}, "$ref": "#/definitions/a~1b%20c"},
    obj(properties={"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "v": INTEGER}, required=["v"]),
    obj(properties={"a": INTEGER, "b": {"$ref": "#/properties/a"}}, required=["b"]),
    {"title": "t", "description": "d", "default": 3, "examples": [1], **INTEGER},
    array(items=obj(properties={"k": {"enum": ["p", "q"]}, "v": {"type": "boolean"}}, required=["k", "v"]), maxItems=2),
]


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda value: json.dumps(value)[:60])
def test_random_answers_under_a_schema_that_is_taken_are_valid(walker, schema):
    texts = walker.texts({"json": schema}, count=30)
    assert texts, "no random answer ended"
    formats = jsonschema.FormatChecker(set(jsonschema.FormatChecker.checkers) - {"time"})  # which takes no fractions
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    for text in texts:
        validator.validate(json.loads(text))


def test_what_the_compiler_warns_about_is_refused(walker):
    with pytest.raises(RequestError, match="not fully enforced: oneOf with overlapping"):
        walker.compiled({"json": {"oneOf": [INTEGER, {"type": "number"}]}})


@pytest.mark.parametrize(("text", "is_taken"), [("{" + " " * 16 + "}", True), ("{" + " " * 17 + "}", False)])
def test_runs_of_spaces_are_bounded(walker, text, is_taken):
    assert walker.accepts({"json_object": True}, text) == is_taken
