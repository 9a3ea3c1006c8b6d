import pytest

from deepinfer.errors import RequestError


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= root "a" | "a"',
        'root ::= a\na ::= b "x" | "y"\nb ::= a',
        'root ::= "" root | "a"',
        'root ::= e\ne ::= e "+" e | "1"',
        'root ::= opt root "x" | "y"\nopt ::= "o" | ""',
        'root ::= [a-z]* root "x" | "y"',
        'root ::= (root "a"){2,5} | "b"',
    ],
)
def test_left_recursion_is_refused(walker, grammar):
    with pytest.raises(RequestError, match="left recursion: rule .* begins with itself"):
        walker.compiled({"grammar": grammar})


@pytest.mark.parametrize("grammar", ["root ::= root", "root ::= a\na ::= b\nb ::= a", 'root ::= "a" root'])
def test_grammars_without_an_end_are_refused(walker, grammar):
    with pytest.raises(RequestError, match="ebnf can never be completed: root"):
        walker.compiled({"grammar": grammar})


def test_schemas_without_an_end_are_refused(walker):
    schema = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    with pytest.raises(RequestError, match="json_schema can never be completed"):
        walker.compiled({"json": schema})


@pytest.mark.parametrize("form", [{"regex": "a{1,1000000}"}, {"grammar": 'root ::= "a"{1000000}'}])
def test_huge_repetitions_are_refused(walker, form):
    with pytest.raises(RequestError, match="repeats something 1000000 times; at most 100000"):
        walker.compiled(form)


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('root ::= "a" root | "b"', "aab"),
        ('root ::= "(" root ")" | ""', "(())"),
        ('root ::= x root | "b"\nx ::= "a"', "aab"),
        ('root ::= a a a\na ::= b b\nb ::= "c"', "cccccc"),
        ("root ::= " + " ".join(["a"] * 3000) + '\na ::= "" | "b"', "b"),
    ],
)
def test_other_recursion_is_taken(walker, grammar, text):
    assert walker.accepts({"grammar": grammar}, text)
