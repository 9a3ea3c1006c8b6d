import numpy as np
import pytest

from deepinfer.structured.matching import LOAD_ROWS, NOBODY, REPLAY_ROWS, MatcherState, Step
from deepinfer.structured.server import COMPILE_SECONDS
from grammar_walker import EOS

ROWS = 4


@pytest.fixture
def memory(walker):
    return np.zeros(1 + ROWS * walker.library.num_words, dtype=np.int32)


@pytest.fixture
def state(walker, memory):
    state = MatcherState(walker.library, memory)
    loads = [(1, walker.compiled({"regex": "[0-9]{3}"})), (2, walker.compiled({"choice": ["yes", "no"]}))]
    assert state.run(Step(loads=loads)) == {}
    return state


def fills(*slots):
    """One mask each, in this order in memory."""
    return [(slot, line, [], 0) for line, slot in enumerate(slots)]


def allowed(walker, memory, row):
    masks = memory[1:].reshape(ROWS, -1)
    return np.flatnonzero(np.unpackbits(masks[row].view(np.uint8), bitorder="little")).tolist()


DIGITS = list(range(ord("0"), ord("9") + 1))


@pytest.mark.parametrize("is_careful", [False, True])
def test_a_step_opens_accepts_and_fills_in_order(state, walker, memory, is_careful):
    opens = [(7, 1, [ord("1"), ord("2")]), (3, 2, [])]
    assert state.run(Step(opens=opens, fills=fills(3, 7), is_careful=is_careful)) == {}
    assert allowed(walker, memory, 0) == [ord("n"), ord("y")] and allowed(walker, memory, 1) == DIGITS
    accepts = [(7, ord("3")), (3, ord("y"))]
    assert state.run(Step(accepts=accepts, fills=fills(7, 3), is_careful=is_careful)) == {}
    assert allowed(walker, memory, 0) == [EOS] and allowed(walker, memory, 1) == [ord("e")]
    assert memory[0] == (3 if is_careful else NOBODY)


def test_a_forbidden_token_is_an_error_of_its_slot_alone(state, walker, memory):
    state.run(Step(opens=[(1, 1, []), (2, 2, [])], fills=fills(1, 2)))
    errors = state.run(Step(accepts=[(1, ord("x")), (2, ord("n"))], fills=fills(1, 2)))
    assert errors == {1: "the grammar does not allow token 120, which was generated"}
    assert allowed(walker, memory, 1) == [ord("o")]
    assert len(allowed(walker, memory, 0)) == 32 * walker.library.num_words


def test_tokens_after_the_end_are_ignored_and_allowed(state, walker, memory):
    state.run(Step(opens=[(1, 2, [ord("n"), ord("o"), EOS])], fills=fills(1)))
    assert state.run(Step(accepts=[(1, ord("x"))], fills=fills(1))) == {}
    assert len(allowed(walker, memory, 0)) == 32 * walker.library.num_words


def test_a_slot_is_opened_again_for_another_answer_and_grammars_are_dropped(state, walker, memory):
    state.run(Step(opens=[(1, 1, [ord("1")])], fills=fills(1)))
    state.run(Step(opens=[(1, 2, [])], fills=fills(1)))
    assert allowed(walker, memory, 0) == [ord("n"), ord("y")]
    state.run(Step(drops=[1]))
    with pytest.raises(KeyError):
        state.run(Step(opens=[(1, 1, [])]))


def test_loads_and_replays_have_time_of_their_own_and_are_known_by_their_slot(walker, memory):
    """A grammar near the limits of the compiler, and a long answer whose matcher was started again."""
    state, limits = MatcherState(walker.library, memory), []
    state._limit = lambda slot, num_rows: limits.append((slot, num_rows))
    loads = [(1, walker.compiled({"regex": "[a-z]{900,}"})), (2, walker.compiled({"choice": ["yes", "no"]}))]
    state.run(Step(loads=loads, opens=[(5, 2, []), (7, 1, [ord("a")] * 600)], fills=fills(5, 7)))
    assert limits == [(7, LOAD_ROWS), (5, LOAD_ROWS), (5, 1), (7, 1 + 600 * REPLAY_ROWS), (NOBODY, 3)]
    assert 600 * REPLAY_ROWS * 0.2 >= 3.0  # xgrammar takes some 1 ms a token where bounds are high
    assert LOAD_ROWS * 0.2 >= COMPILE_SECONDS


def test_several_tokens_of_one_slot_are_taken_in_order(state, walker, memory):
    state.run(Step(opens=[(1, 1, []), (2, 2, [])], fills=fills(1, 2)))
    accepts = [(1, ord("1")), (1, ord("2")), (2, ord("n")), (1, ord("3"))]
    assert state.run(Step(accepts=accepts, fills=fills(1, 2))) == {}
    assert allowed(walker, memory, 0) == [EOS] and allowed(walker, memory, 1) == [ord("o")]


@pytest.mark.parametrize("is_careful", [False, True])
def test_masks_along_drafts_leave_the_answer_where_it_was(state, walker, memory, is_careful):
    opens = [(1, 2, []), (2, 1, [])]
    wanted = [(1, 0, [ord("y"), ord("e")], 0), (2, 3, [], 0)]
    for _ in range(2):
        assert state.run(Step(opens=opens, fills=wanted, is_careful=is_careful)) == {}
        assert [allowed(walker, memory, row) for row in range(4)] == [[110, 121], [101], [115], DIGITS]
        opens = []


@pytest.mark.parametrize("is_careful", [False, True])
def test_only_the_masks_from_the_first_wanted_one_on_are_written(state, walker, memory, is_careful):
    opens, drafts = [(1, 2, []), (2, 1, [])], [ord("y"), ord("e")]
    memory[1:] = 0
    state.run(Step(opens=opens, fills=[(1, 0, drafts, 2), (2, 3, [], 0)], is_careful=is_careful))
    assert [allowed(walker, memory, row) for row in range(4)] == [[], [], [ord("s")], DIGITS]


@pytest.mark.parametrize("is_careful", [False, True])
def test_masks_behind_a_forbidden_draft_allow_everything(state, walker, memory, is_careful):
    opens = [(1, 2, []), (2, 1, [])]
    memory[1:] = 0
    state.run(Step(opens=opens, fills=[(1, 0, [ord("x"), ord("e")], 1)], is_careful=is_careful))
    everything = list(range(32 * walker.library.num_words))
    assert [allowed(walker, memory, row) for row in range(4)] == [[], everything, everything, []]
    state.run(Step(fills=fills(1)))
    assert allowed(walker, memory, 0) == [ord("n"), ord("y")]
