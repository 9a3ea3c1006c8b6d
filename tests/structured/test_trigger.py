from deepinfer.structured.grammar import Constraint, Grammar
from deepinfer.structured.trigger import Trigger


def follow(trigger, bound, tokens):
    """Whether the grammar is active before each token and at the end, and what is forced there."""
    state = Trigger(Constraint(Grammar("regex", "a"), tuple(trigger), bound))
    seen = [(state.is_active, state.forced_token)]
    for token in tokens:
        state.take(token)
        seen.append((state.is_active, state.forced_token))
    return seen


def test_without_trigger_the_grammar_is_active_from_the_start():
    assert follow([], None, []) == [(True, None)]


def test_the_whole_sequence_activates():
    assert follow([5, 6], None, [6, 5, 5, 6]) == [(False, None)] * 4 + [(True, None)]
    assert follow([5, 5, 6], None, [5, 5, 5, 6])[-1] == (True, None)


def test_parts_of_the_sequence_do_not():
    assert follow([5, 6, 7], None, [5, 6, 5, 7, 6, 7])[-1] == (False, None)


def test_the_bound_token_forces_the_rest_of_the_trigger():
    assert follow([5, 6, 7, 8], 6, [1, 6, 7, 8]) == [(False, None)] * 2 + [(False, 7), (False, 8), (True, None)]
    assert follow([5, 6], 6, [6])[-1] == (True, None)
    assert follow([5, 6], 5, [5]) == [(False, None), (False, 6)]
