"""Checks on the rules of a parsed grammar: it must be able to end, and must not call itself on the left.

The graph is what xgrammar's `Grammar.serialize_json` gives: rules, each with an expression, and the
expressions as flat integers (kind, length, data ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepinfer.errors import RequestError

EMPTY, RULE, SEQUENCE, CHOICES, REPEAT = 3, 4, 5, 6, 8  # kinds of expressions; the others match some text
CLASS_STAR, BYTES = 2, 0
MAX_REPEAT = 100_000


def check_graph(kind: str, graph: dict[str, Any]) -> None:
    """Raise RequestError for rules that can never end, too many repetitions, or left recursion in EBNF."""
    rules = _Rules(graph)
    if kind != "json_schema":  # whose bounds are checked in the schema
        for expression in rules.expressions():
            if expression[0] == REPEAT and max(expression[3:5]) > MAX_REPEAT:
                raise RequestError(
                    f"{kind} repeats something {max(expression[3:5])} times; at most {MAX_REPEAT} are taken, "
                    "lower the bound or leave it open"
                )
    can_end = rules.fixed_point(rules.can_end)
    if graph["root_rule_id"] not in can_end:
        endless = ", ".join(rules.names[rule] for rule in range(len(rules.names)) if rule not in can_end)
        raise RequestError(f"{kind} can never be completed: {endless:.80} call each other without an end; give one")
    if kind == "ebnf" and (name := rules.left_recursive()) is not None:
        raise RequestError(f"grammar has left recursion: rule {name} begins with itself; write it as a repetition")


class _Rules:
    def __init__(self, graph: dict[str, Any]) -> None:
        self.names: list[str] = [rule[0] for rule in graph["rules"]]
        self._bodies: list[int] = [rule[1] for rule in graph["rules"]]
        self._data: list[int] = graph["grammar_expr_data"]
        self._places: list[int] = graph["grammar_expr_indptr"]

    def expressions(self) -> Iterator[list[int]]:
        return (self._expression(number) for number in range(len(self._places)))

    def _expression(self, number: int) -> list[int]:
        start = self._places[number]
        return self._data[start : start + 2 + self._data[start + 1]]

    def fixed_point(self, holds: Callable[[int, set[int]], bool]) -> set[int]:
        """The rules whose body has a property, which may rest on other rules having it."""
        found: set[int] = set()
        left = list(range(len(self.names)))
        while True:
            new = {rule for rule in left if holds(self._bodies[rule], found)}
            if not new:
                return found
            found |= new
            left = [rule for rule in left if rule not in new]

    def can_end(self, number: int, known: set[int]) -> bool:
        """Whether some text matches the expression, given the rules that some text matches."""
        return self._holds(number, known, lambda expression: True)

    def is_empty(self, number: int, known: set[int]) -> bool:
        """Whether the empty text matches, given the rules that it matches."""
        return self._holds(number, known, _matches_nothing)

    def _holds(self, number: int, known: set[int], holds: Callable[[list[int]], bool]) -> bool:
        """A property that sequences have if all their parts do, choices if one does, and others by `holds`."""
        expression = self._expression(number)
        kind, _, *data = expression
        if kind == RULE:
            return data[0] in known
        if kind == REPEAT:
            return data[1] == 0 or data[0] in known
        if kind in (SEQUENCE, CHOICES):
            return (all if kind == SEQUENCE else any)(self._holds(part, known, holds) for part in data)
        return holds(expression)

    def left_recursive(self) -> str | None:
        """The name of a rule that can begin with itself."""
        empty = self.fixed_point(self.is_empty)
        starts = [list(self._first_rules(body, empty)) for body in self._bodies]
        is_done = [False] * len(starts)
        for root in range(len(starts)):
            path, on_path = [(root, 0)], {root}
            while path:
                rule, at = path.pop()
                if at < len(starts[rule]) and not is_done[rule]:
                    path.append((rule, at + 1))
                    following = starts[rule][at]
                    if following in on_path:
                        return self.names[following]
                    path.append((following, 0))
                    on_path.add(following)
                else:
                    is_done[rule] = True
                    on_path.discard(rule)
        return None

    def _first_rules(self, number: int, empty: set[int]) -> Iterator[int]:
        """Rules that a text of this expression can begin with."""
        kind, _, *data = self._expression(number)
        if kind in (RULE, REPEAT):
            yield data[0]
        elif kind == CHOICES:
            for part in data:
                yield from self._first_rules(part, empty)
        elif kind == SEQUENCE:
            for part in data:
                yield from self._first_rules(part, empty)
                if not self.is_empty(part, empty):
                    return


def _matches_nothing(expression: list[int]) -> bool:
    """Whether an expression without parts matches the empty text."""
    kind, length = expression[:2]
    return kind in (EMPTY, CLASS_STAR) or (kind == BYTES and length == 0)
