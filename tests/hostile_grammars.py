"""Grammars that somebody might send to hurt: wrong ones, and ones that explode."""

from deepinfer.structured.grammar import Grammar

DEEP = "root ::= " + "(" * 5000 + '"a"' + ")" * 5000
# Sixty rules of two calls each: 2^60 letters.
DOUBLING = "root ::= a0\n" + "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60)) + '\na60 ::= "x" | ""'
WIDE = "root ::= " + "|".join(f'"{i}"' for i in range(25_000))
HOSTILE = [
    Grammar("regex", "("),
    Grammar("regex", "(?<=a)b"),
    Grammar("regex", "(?=a)b"),
    Grammar("regex", r"(a)\1"),
    Grammar("regex", "a{1,1000000}"),
    Grammar("regex", "a{99999999999999999999}"),
    Grammar("regex", "(" * 50_000 + "a" + ")" * 50_000),
    Grammar("regex", "((a{1,1000}){1,1000}){1,1000000}"),
    Grammar("ebnf", 'root ::= root "a" | "a"'),
    Grammar("ebnf", "root ::= root"),
    Grammar("ebnf", "root ::= missing"),
    Grammar("ebnf", DEEP),
    Grammar("json_schema", '{"$ref": "#"}'),
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
    Grammar("regex", "|".join(f"[a-z]{{{i},{i + 50}}}{i}" for i in range(300))),
]
