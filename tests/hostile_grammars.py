"""Grammars that somebody might send to hurt: wrong ones, and ones that explode."""

import json

from deepinfer.structured.grammar import Grammar

DEEP = "root ::= " + "(" * 5000 + '"a"' + ")" * 5000
# Sixty rules of two calls each: 2^60 letters.
DOUBLING = "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60)) + '\na60 ::= "x" | ""'
WIDE = "root ::= " + "|".join(f'"{i}"' for i in range(25_000))
MANY_PROPERTIES = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(4000)}})
# Any of 40 optional properties of 40 kinds, between 20 and 30 of them.
ORDERS = json.dumps(
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "maxLength": 1000 + i} for i in range(40)},
        "minProperties": 20,
        "maxProperties": 30,
        "additionalProperties": False,
    }
)
HOSTILE = [
    Grammar("regex", "("),
    Grammar("regex", "(?<=a)b"),
    Grammar("regex", "(?=a)b"),
    Grammar("regex", "(?<!a)b"),
    Grammar("regex", "(?!a)b"),
    Grammar("regex", r"(a)\1"),
    Grammar("regex", "[z-a]"),
    Grammar("regex", "a{3,2}"),
    Grammar("regex", "*a"),
    Grammar("regex", "["),
    Grammar("regex", "(?P<n>a)(?P=n)"),
    Grammar("regex", "a{1,1000000}"),
    Grammar("regex", "a{99999999999999999999}"),
    Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
    Grammar("regex", "((a{1,1000}){1,1000}){1,1000000}"),
    Grammar("ebnf", 'root ::= root "a" | "a"'),
    Grammar("ebnf", "root ::= root"),
    Grammar("ebnf", 'root ::= a "x" | "y"\na ::= b\nb ::= root'),
    Grammar("ebnf", 'root ::= "a"{1,1000000}'),
    Grammar("ebnf", 'root ::= "a'),
    Grammar("ebnf", 'start ::= "a"'),
    Grammar("ebnf", "root ::= missing"),
    Grammar("ebnf", DEEP),
    Grammar("json_schema", '{"$ref": "#"}'),
    Grammar("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}'),
    Grammar("json_schema", '{"anyOf": [{"$ref": "#"}]}'),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    Grammar("json_schema", '{"type": "array", "maxItems": 18446744073709551615}'),
    Grammar("json_schema", '{"type": "array", "items": ' * 5000 + "true" + "}" * 5000),
]
# These may be compiled or refused, but take neither much time nor much memory.
HEAVY = [
    Grammar("ebnf", DOUBLING),
    Grammar("ebnf", WIDE),
    Grammar("regex", "(.{0,1000}){0,1000}"),
    Grammar("regex", "(a?){500}a{500}"),
    Grammar("regex", "((a|b|ab)*)*c"),
    Grammar("regex", "x" * 200_000),
    Grammar("regex", "(a|aa)*" * 30 + "b"),
    Grammar("regex", "(.*a){30}"),
    Grammar("regex", "[^a]{1,100000}"),
    Grammar("json_schema", '{"type": "string", "minLength": 90000, "maxLength": 100000}'),
    Grammar("json_schema", '{"type": "array", "minItems": 50000, "maxItems": 100000}'),
    Grammar("json_schema", '{"type": "string", "pattern": "^(.{0,1000}){0,1000}$"}'),
    Grammar("json_schema", MANY_PROPERTIES),
    Grammar("json_schema", ORDERS),
    Grammar("regex", "|".join(f"[a-z]{{{i},{i + 50}}}{i}" for i in range(300))),
]
