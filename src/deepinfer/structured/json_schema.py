"""Which JSON schemas are taken: those whose every rule the compiler enforces. The others are refused, by path.

The rules were found by experiment with xgrammar 0.2.9 (`tests/structured/test_json_schema.py` repeats
it): what it ignores, wholly or in some combination, must not come through here. It is stricter
than the standard in three ways, which is safe: an object that lists properties takes no others
unless `additionalProperties` says so, properties come in their listed order, and a `pattern`
matches the whole string.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeAlias
from urllib.parse import unquote

from deepinfer.errors import RequestError, shown

Schema: TypeAlias = dict[str, Any]

MAX_DEPTH = 64
MAX_BOUND = 100_000  # of items, characters and properties
MAX_NUMBER = 2**53  # integers beyond it are not the same in every JSON reader

# Formats that are replaced by a pattern, since the compiler's own rule lets through what is no date or address.
_YEAR, _TIME = "[1-9][0-9]{3}", "([01][0-9]|2[0-3]):[0-5][0-9]"
_LEAP_YEAR = "([1-9][0-9](0[48]|[2468][048]|[13579][26])|([2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_FULL_TIME = f"{_TIME}:[0-5][0-9](\\.[0-9]{{1,6}}){{0,1}}(Z|[+-]{_TIME})"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9][0-9]|[0-9])"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_FULL_TIME}$",
    "ipv4": f"^({_BYTE}\\.){{3}}{_BYTE}$",
    "time": f"^{_FULL_TIME}$",
}
FORMATS = (
    *FORMAT_PATTERNS, "duration", "email", "hostname", "ipv6", "json-pointer", "relative-json-pointer", "uri",
    "uri-reference", "uri-template", "uuid",
)  # fmt: skip
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
ANNOTATIONS = ("$comment", "$id", "$schema", "default", "deprecated", "description", "example", "examples", "nullable",
               "readOnly", "title", "writeOnly")  # fmt: skip
DEFINITIONS = ("$defs", "definitions")
BRANCHES = ("anyOf", "oneOf", "allOf")
ALONE = ("$ref", "enum", "const", *BRANCHES)  # enforced only without other rules beside them
BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# The type that each keyword speaks of.
KEYWORD_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys((*LIMITS, "multipleOf"), ("integer", "number")),
    **dict.fromkeys(
        ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems"), ("array",)
    ),
    **dict.fromkeys(
        ("properties", "required", "additionalProperties", "propertyNames", "minProperties", "maxProperties",
         "unevaluatedProperties"), ("object",),
    ),
}  # fmt: skip
# A group that may be left out, written so that the compiler understands it right also if the group holds a loop.
OPTIONAL_GROUP = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\)\?", re.DOTALL)
# Characters that a pattern would put into a JSON string without the escape they need there.
UNESCAPED = re.compile(r'["\x00-\x1f]|\\[^dDwWsSbB.^$*+?()\[\]{}|/\-:,=!<>@#%&~\'`; _]')


def checked_schema(schema: object) -> str:
    """A JSON schema (a mapping, true, or its text) as text for the compiler.

    Raises RequestError with keyword and path for what is damaged or not enforced.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"json is no JSON text ({error}); give a JSON schema") from None
    if not isinstance(schema, dict) and schema is not True:
        raise RequestError(f"json is {shown(schema)}; it must be a JSON schema: an object, or its text")
    try:
        text = json.dumps(_Checker(schema).rewritten(schema, "#", 0), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"json cannot be written as JSON ({error}); give a JSON schema") from None
    return text


class _Checker:
    """Walks one schema; paths are JSON pointers."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._sound: set[str] = set()  # what $ref may name without going round in circles

    def rewritten(self, schema: Any, path: str, depth: int) -> Any:
        """The schema without what is settled here. Raises RequestError."""
        if schema is True:
            return True
        if not isinstance(schema, dict):
            why = "accepts nothing" if schema is False else "is no schema"
            raise RequestError(f"json: {path} is {shown(schema)}, which {why}; it must be an object or true")
        if depth > MAX_DEPTH:
            raise RequestError(f"json: {path} is nested deeper than {MAX_DEPTH} schemas; use $ref or a flatter schema")
        rules = self._rules(schema, path)
        result: Schema = {name: rule for name, rule in schema.items() if name in rules}
        definitions = {
            name: self._named(schema[name], f"{path}/{name}", depth) for name in DEFINITIONS if name in schema
        }
        for name in ALONE:
            if name in rules:
                return {**definitions, **self._alone(name, result, path, depth)}
        return {**definitions, **self._plain(result, rules, path, depth)}

    def _rules(self, schema: Schema, path: str) -> list[str]:
        """The keywords that restrict; raises RequestError for one that is not enforced."""
        rules = [name for name in schema if name not in ANNOTATIONS and name not in DEFINITIONS]
        for name in rules:
            if name not in KEYWORD_TYPES and name not in ALONE and name != "type":
                raise _refusal(path, name, "is not supported; leave it out")
        if "$id" in schema and path != "#":
            raise _refusal(path, "$id", "is supported at the root only; leave it out")
        return rules

    def _named(self, schemas: object, path: str, depth: int) -> Schema:
        if not isinstance(schemas, dict):
            raise RequestError(f"json: {path} is {shown(schemas)}; it must map names to schemas")
        return {name: self.rewritten(schema, f"{path}/{_escaped(name)}", depth + 1) for name, schema in schemas.items()}

    # -- keywords that stand alone

    def _alone(self, name: str, schema: Schema, path: str, depth: int) -> Schema:
        is_value = name in ("enum", "const")
        for other in schema:
            if other != name and not (is_value and other == "type"):
                raise _refusal(path, other, f"is not enforced beside {name}; move it to where {name} leads")
        if is_value:
            return _enumeration(name, schema, path)
        if name == "$ref":
            self._follow(schema, path, ())
            return schema
        return {name: self._branches(name, schema[name], path, depth)}

    def _follow(self, schema: Any, path: str, seen: tuple[str, ...]) -> None:
        """Raise RequestError when a $ref leads back to itself before anything was written."""
        if not isinstance(schema, dict):
            return
        ref = schema.get("$ref")
        if ref is not None and ref not in self._sound:
            if ref in seen:
                raise _refusal(path, "$ref", f"{shown(ref)} leads back to itself and describes nothing; break the loop")
            self._follow(self._target(ref, path), path, (*seen, ref))
            self._sound.add(ref)
        for name in BRANCHES:
            branches = schema.get(name)
            for branch in branches if isinstance(branches, list) else ():
                self._follow(branch, path, seen)

    def _target(self, ref: object, path: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise _refusal(path, "$ref", f"is {shown(ref)}; it must point into this schema, as in #/$defs/name")
        target = self._root
        for part in ref.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise _refusal(path, "$ref", f"is {shown(ref)}, but the schema has no such place")
        return target

    def _branches(self, name: str, branches: object, path: str, depth: int) -> list[Any]:
        if not isinstance(branches, list) or not branches:
            raise _refusal(path, name, f"is {shown(branches)}; it must be a list of schemas")
        if name == "allOf" and len(branches) > 1:
            raise _refusal(path, name, "is supported with one schema only; merge its schemas into one")
        for branch in branches:
            self._follow(branch, path, (path,))
        return [self.rewritten(branch, f"{path}/{name}/{i}", depth + 1) for i, branch in enumerate(branches)]

    # -- types and what belongs to them

    def _plain(self, schema: Schema, rules: list[str], path: str, depth: int) -> Schema:
        types = _types(schema, path)
        if not types:
            types = _implied_types(rules, path)
            if types:
                schema["type"] = types[0]
        self._check_bounds(schema, path)
        if "string" in types:
            _check_string(schema, path)
        _check_numbers(schema, types, path)
        if "array" in types:
            self._check_array(schema, path, depth)
        if "object" in types:
            self._check_object(schema, path, depth)
        return schema

    def _check_bounds(self, schema: Schema, path: str) -> None:
        for name in BOUNDS:
            bound = schema.get(name, 0)
            if isinstance(bound, bool) or not isinstance(bound, int) or not 0 <= bound <= MAX_BOUND:
                raise _refusal(path, name, f"is {shown(bound)}; it must be a whole number from 0 to {MAX_BOUND}")
        for low, high in zip(BOUNDS[::2], BOUNDS[1::2], strict=True):
            if low in schema and high in schema and schema[low] > schema[high]:
                raise _refusal(path, low, f"is {schema[low]}, but {high} is {schema[high]}; nothing can have both")

    def _check_array(self, schema: Schema, path: str, depth: int) -> None:
        if schema.pop("uniqueItems", False) is not False:
            raise _refusal(path, "uniqueItems", "is not supported; leave it out")
        if schema.get("unevaluatedItems", False) is not False:
            raise _refusal(path, "unevaluatedItems", "is supported only as false; use items")
        if "prefixItems" in schema:
            prefix = schema["prefixItems"]
            if not isinstance(prefix, list):
                raise _refusal(path, "prefixItems", f"is {shown(prefix)}; it must be a list of schemas")
            if schema.get("maxItems", MAX_BOUND) < len(prefix):
                raise _refusal(path, "maxItems", f"is {schema['maxItems']}, but prefixItems has {len(prefix)} schemas")
            schema["prefixItems"] = [
                self.rewritten(item, f"{path}/prefixItems/{i}", depth + 1) for i, item in enumerate(prefix)
            ]
        most = max(schema.get("minItems", 0), schema.get("maxItems", 0))
        if not {"items", "unevaluatedItems"} & schema.keys() and most > len(schema.get("prefixItems", ())):
            schema["items"] = True  # the compiler would close the array
        if schema.get("items", False) is not False:
            schema["items"] = self.rewritten(schema["items"], f"{path}/items", depth + 1)

    def _check_object(self, schema: Schema, path: str, depth: int) -> None:
        properties = schema.get("properties")
        if properties is not None:
            properties = schema["properties"] = self._named(properties, f"{path}/properties", depth)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _refusal(path, "required", f"is {shown(required)}; it must be a list of property names")
        for name in required:
            if name not in (properties or {}):
                raise _refusal(path, "required", f"names {shown(name)}; it must be one of properties to be enforced")
        if "unevaluatedProperties" in schema:
            if schema.pop("unevaluatedProperties") is not False:
                raise _refusal(path, "unevaluatedProperties", "is supported only as false; use additionalProperties")
            schema.setdefault("additionalProperties", False)
        if properties is None and {"minProperties", "maxProperties"} & schema.keys():
            schema.setdefault("additionalProperties", True)  # the compiler would close the object
        others = schema.get("additionalProperties", properties is None)
        if others is not False:
            if "additionalProperties" in schema:
                schema["additionalProperties"] = self.rewritten(others, f"{path}/additionalProperties", depth + 1)
            if schema.get("minProperties", 0) > 1:
                raise _refusal(path, "minProperties", "above 1 is enforced only with additionalProperties false")
        if "propertyNames" in schema:
            if properties is not None:
                raise _refusal(path, "propertyNames", "is not enforced beside properties; leave one of them out")
            schema["propertyNames"] = self.rewritten(schema["propertyNames"], f"{path}/propertyNames", depth + 1)


def _enumeration(name: str, schema: Schema, path: str) -> Schema:
    """The values that fit the type beside them, since the compiler does not look at it."""
    values = schema["enum"] if name == "enum" else [schema["const"]]
    if not isinstance(values, list):
        raise _refusal(path, name, f"is {shown(values)}; it must be a list of values")
    types = _types(schema, path)
    fitting = [value for value in values if not types or any(_is_of(value, kind) for kind in types)]
    if not fitting:
        raise _refusal(path, name, "has no value that fits its type")
    return {"enum": fitting}


def _types(schema: Schema, path: str) -> list[str]:
    given = schema.get("type", [])
    types = given if isinstance(given, list) else [given]
    for kind in types or ([None] if "type" in schema else []):
        if kind not in TYPES:
            raise _refusal(path, "type", f"is {shown(kind)}; it must be one of {', '.join(TYPES)}, or a list of them")
    return types


def _implied_types(rules: list[str], path: str) -> list[str]:
    """The type of a schema without `type`, by its keywords."""
    kinds = {KEYWORD_TYPES[name][-1]: name for name in rules if name in KEYWORD_TYPES}
    if len(kinds) > 1:
        raise _refusal(path, next(iter(kinds.values())), 'needs "type" beside it to be enforced')
    return list(kinds)


def with_counted_groups(regex: str) -> str:
    """The regular expression with `(...){0,1}` for `(...)?`, see `OPTIONAL_GROUP`."""
    return OPTIONAL_GROUP.sub(lambda part: "){0,1}" if part[0] == ")?" else part[0], regex)


def _check_string(schema: Schema, path: str) -> None:
    rules = [name for name in ("pattern", "format") if name in schema]
    lengths = [name for name in ("minLength", "maxLength") if name in schema]
    if rules and len(rules + lengths) > 1:
        raise _refusal(path, (rules[1:] + lengths)[0], f"is not enforced beside {rules[0]}; leave one of them out")
    if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] not in FORMATS):
        raise _refusal(path, "format", f"is {shown(schema['format'])}; supported are {', '.join(FORMATS)}")
    if "pattern" in schema:
        pattern = schema["pattern"]
        if not isinstance(pattern, str):
            raise _refusal(path, "pattern", f"is {shown(pattern)}; it must be a regular expression")
        if found := UNESCAPED.search(pattern):
            raise _refusal(
                path,
                "pattern",
                f"holds {shown(found[0])}; a JSON string has it escaped, and patterns do not see escapes",
            )
        schema["pattern"] = with_counted_groups(pattern)
    if schema.get("format") in FORMAT_PATTERNS:
        schema["pattern"] = FORMAT_PATTERNS[schema.pop("format")]


def _check_numbers(schema: Schema, types: list[str], path: str) -> None:
    for name in LIMITS:
        limit = schema.get(name, 0)
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not -MAX_NUMBER <= limit <= MAX_NUMBER:
            raise _refusal(path, name, f"is {shown(limit)}; it must be a number within +-2^53")
        if "integer" in types and limit != int(limit):
            raise _refusal(path, name, f"is {limit}; it must be a whole number for type integer")
    if "multipleOf" in schema and not {"integer", "number"}.isdisjoint(types):
        factor = schema["multipleOf"]
        is_whole = isinstance(factor, int) and not isinstance(factor, bool) and 1 <= factor <= 1024
        if "number" in types or not is_whole or any(name in schema for name in LIMITS):
            raise _refusal(
                path, "multipleOf", "is supported for type integer without limits, as a whole number from 1 to 1024"
            )


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and math.isfinite(value) and value == int(value))
    return isinstance(value, {"string": str, "array": list, "object": dict}.get(kind, ()))


def _escaped(name: object) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def _refusal(path: str, keyword: str, problem: str) -> RequestError:
    return RequestError(f"json: {keyword} at {path} {problem}")
