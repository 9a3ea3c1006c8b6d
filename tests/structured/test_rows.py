"""From plans to masks, with a matcher that can be made to end early."""

from __future__ import annotations

import mmap
import os
import threading
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from deepinfer.messages import SlotSetup
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import CompiledGrammar
from deepinfer.structured.matching import NOBODY, MatcherState
from deepinfer.structured.rows import ConstrainedRows
from grammar_walker import EOS

FORMS = {1: {"regex": "[0-9]{3}"}, 2: {"choice": ["yes", "no"]}, 3: {"regex": "bad+"}}


class Hang(Exception):
    """Stands for a matcher process that the kernel ends."""


class FakeServer:
    """Runs the matcher in a thread. A slot that `spoils` ends it; one that is_broken ends before it does anything.

    held: the number of a step that waits for `release`, counted from 1; 0 = none.
    """

    vocab_size, end_ids = 257, (EOS,)

    def __init__(self, walker):
        self._walker = walker
        self.num_started = 0
        self.steps = []
        self.spoils = lambda step: False
        self.is_broken = False
        self.held, self.release = 0, threading.Event()

    def connect(self, fd):
        self.num_started += 1
        ours, theirs = Pipe()
        memory = np.frombuffer(mmap.mmap(os.dup(fd), 0), dtype=np.int32)
        threading.Thread(
            target=self._serve, args=(theirs, MatcherState(self._walker.library, memory)), daemon=True
        ).start()
        return ours

    def _serve(self, connection, state):
        state._limit = lambda slot, rows: self._limit(state, slot)
        with connection:
            while True:
                try:
                    step = connection.recv()
                except (EOFError, OSError):
                    return
                self.steps.append(step)
                if self.is_broken:
                    return
                if len(self.steps) == self.held:
                    assert self.release.wait(60)
                try:
                    connection.send((step.number, state.run(step)))
                except (Hang, OSError):
                    return

    def _limit(self, state, slot):
        state._turn[0] = slot
        if self.spoils(slot):
            raise Hang


@pytest.fixture
def server(walker):
    return FakeServer(walker)


@pytest.fixture
def rows(server):
    return ConstrainedRows(server, num_slots=8, num_drafts=3)


def setup(walker, slot, number, generated=(), **constraint):
    form = FORMS[number]
    params = SamplingParams(structured_outputs=form, seed=1)
    if constraint:
        ((kind, schema),) = form.items()
        params = SamplingParams(so_args={"schema_type": kind, "schema": schema, **constraint}, seed=1)
    known = np.array([7, *generated], dtype=np.int32)  # a prompt of one token before them
    return SlotSetup(slot, params, 1, known, grammar=CompiledGrammar(number, walker.compiled(form)))


def free(slot):
    """A request without a grammar."""
    return SlotSetup(slot, SamplingParams(seed=1), 1, np.array([7], dtype=np.int32))


def plan(*slots, samples=None):
    """Slots of the rows that sample."""
    return np.array([slot for place, slot in enumerate(slots) if samples is None or samples[place]], dtype=np.int32)


def step(rows, slots, setups=(), drafts=None):
    """Masks and errors by line; drafts: what each row checks."""
    rows.set_slots(setups)
    drafts = drafts or [[] for _ in slots]
    most = max(len(own) for own in drafts)
    table = np.array([own + [0] * (most - len(own)) for own in drafts], dtype=np.int32).reshape(len(slots), most)
    rows.begin(slots, np.array([1 + len(own) for own in drafts], dtype=np.int32), table)
    masks = rows.masks()
    if masks is None:
        return {}, {}
    bits = np.unpackbits(np.ascontiguousarray(masks.bits).view(np.uint8), axis=1, bitorder="little")[:, :257]
    return {
        row: np.flatnonzero(line).tolist() for row, line in zip(masks.rows.tolist(), bits, strict=True)
    }, masks.errors


def ids(*tokens):
    return [ord(token) if isinstance(token, str) else token for token in tokens]


def take(rows, *tokens):
    """One token for each row."""
    count = len(tokens)
    rows.take(np.array(ids(*tokens), dtype=np.int32), np.arange(count), np.ones(count, dtype=np.int32))


def int32(*values):
    return np.array(values, dtype=np.int32)


DIGITS, EVERYTHING = list(range(ord("0"), ord("9") + 1)), list(range(257))


def test_nothing_is_started_without_constrained_rows(rows, server):
    rows.set_slots([free(1)])
    assert step(rows, plan(1, 2)) == ({}, {})
    take(rows, 5, 6)
    assert server.num_started == 0


def test_only_sampling_constrained_rows_have_masks(rows, walker):
    setups = [setup(walker, 2, 1), free(3), setup(walker, 5, 2), setup(walker, 6, 2)]
    masks, errors = step(rows, plan(6, 3, 2, 5, samples=[False, True, True, True]), setups)
    assert masks == {1: DIGITS, 2: [ord("n"), ord("y")]} and errors == {}
    take(rows, 9, "4", "n")
    assert step(rows, plan(3, 5, 6, 2))[0] == {1: [ord("o")], 2: [ord("n"), ord("y")], 3: DIGITS}


def test_a_new_occupant_begins_anew_and_one_without_grammar_has_no_mask(rows, walker):
    assert step(rows, plan(1), [setup(walker, 1, 2)])[0] == {0: [ord("n"), ord("y")]}
    take(rows, "y")
    assert step(rows, plan(1), [setup(walker, 1, 1)])[0] == {0: DIGITS}
    take(rows, "1")
    assert step(rows, plan(1), [free(1)]) == ({}, {})


def test_a_request_comes_back_from_preemption_where_it_was(rows, walker):
    masks, _ = step(
        rows, plan(4, 5), [setup(walker, 4, 2, [ord("y")]), setup(walker, 5, 1, [ord("1"), ord("2"), ord("3")])]
    )
    assert masks == {0: [ord("e")], 1: [EOS]}


def test_the_grammar_waits_for_its_trigger_and_the_bound_token_forces_it(rows, walker):
    args = {"trigger_token_ids": [100, 101, 102], "bound_token_id": 101}
    seen = [step(rows, plan(1), [setup(walker, 1, 2, **args)])[0]]
    for token in (100, 7, 101, 102, "n"):
        take(rows, token)
        seen.append(step(rows, plan(1))[0])
    assert [line[0] for line in seen] == [EVERYTHING, EVERYTHING, EVERYTHING, [102], [ord("n"), ord("y")], [ord("o")]]


def test_a_preempted_answer_remembers_its_trigger(rows, walker):
    args = {"trigger_token_ids": [100, 101], "bound_token_id": 100}
    assert step(rows, plan(1), [setup(walker, 1, 2, [7, 100], **args)])[0] == {0: [101]}
    assert step(rows, plan(1), [setup(walker, 1, 2, [7, 100, 101, ord("n")], **args)])[0] == {0: [ord("o")]}


def test_a_matcher_that_ends_is_replaced_and_nobody_notices(rows, walker, server):
    step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 2)])
    take(rows, "1", "n")
    ends = iter([True])
    server.spoils = lambda slot: next(ends, False)
    assert step(rows, plan(1, 2)) == ({0: DIGITS, 1: [ord("o")]}, {})
    take(rows, "2", "o")
    assert step(rows, plan(1, 2)) == ({0: DIGITS, 1: [EOS]}, {})
    assert server.num_started == 2 and not server.steps[-1].is_careful


def test_an_answer_whose_matcher_is_ended_from_outside_once_more_goes_on(rows, walker, server):
    step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 2)])
    take(rows, "1", "n")
    ends = iter([True, True])
    server.spoils = lambda slot: next(ends, False)
    assert step(rows, plan(1, 2)) == ({0: DIGITS, 1: [ord("o")]}, {})
    assert server.num_started == 3


def test_the_answer_that_ends_the_matcher_is_given_up_alone(rows, walker, server):
    setups = [setup(walker, 1, 1), setup(walker, 2, 3), setup(walker, 3, 2)]
    step(rows, plan(1, 2, 3), setups)
    take(rows, "1", "b", "n")
    has_bad = [True]
    server.spoils = lambda slot: has_bad[0] and slot == (2 if server.steps[-1].is_careful else NOBODY)
    masks, errors = step(rows, plan(1, 2, 3))
    assert masks[0] == DIGITS and masks[2] == [ord("o")]
    assert list(errors) == [1] and "takes too much time or crashes" in errors[1]
    has_bad[0] = False
    take(rows, "1", 0, "o")
    assert step(rows, plan(1, 3)) == ({0: DIGITS, 1: [EOS]}, {})


def test_the_reply_to_a_step_that_nobody_waited_for_is_not_taken_for_that_of_a_later_one(rows, walker, server):
    """As after a forward that failed: its masks are those of the slot's occupant before."""
    step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 2)])
    take(rows, "1", "n")
    rows.begin(plan(1, 2), int32(1, 1), None)
    server.held = 3
    masks = step(rows, plan(1, 2), [setup(walker, 1, 2)])
    server.release.set()
    assert masks == ({0: ids("n", "y"), 1: ids("o")}, {})
    take(rows, "y", "o")
    assert step(rows, plan(1, 2)) == ({0: ids("e"), 1: [EOS]}, {})


def test_a_matcher_that_always_ends_gives_up_its_answers_and_returns(rows, walker, server):
    server.is_broken = True
    _, errors = step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 2)])
    assert set(errors) == {0, 1} and all("again and again" in error for error in errors.values())


def test_a_grammar_that_ends_the_matcher_when_it_is_loaded_is_given_up_alone(rows, walker, server, monkeypatch):
    load, bad = walker.library.load, walker.compiled(FORMS[3])

    def hang_at_bad(data):
        if data == bad:
            raise Hang
        return load(data)

    monkeypatch.setattr(walker.library, "load", hang_at_bad)
    masks, errors = step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 3)])
    assert masks[0] == DIGITS and list(errors) == [1] and "takes too much time or crashes" in errors[1]
    assert server.num_started == 3


def test_a_grammar_without_a_next_token_is_an_error_of_its_row():
    """A vocabulary of one byte cannot spell the grammar."""
    from deepinfer.structured.xgrammar_library import XGrammar
    from grammar_walker import Walker

    walker = Walker.__new__(Walker)
    walker.library = XGrammar([b"y"] + [b""] * 256, 257, [EOS])
    rows = ConstrainedRows(FakeServer(walker), num_slots=2)
    step(rows, plan(1), [setup(walker, 1, 2)])
    take(rows, 0)
    masks, errors = step(rows, plan(1))
    assert masks == {0: []} and "allows none of the model's tokens" in errors[0]


def test_grammars_that_nobody_uses_are_dropped(rows, walker, server, monkeypatch):
    monkeypatch.setattr("deepinfer.structured.link.MAX_LOADED", 2)
    for number in (1, 2, 3):
        step(rows, plan(1), [setup(walker, 1, number)])
    assert [len(sent.loads) for sent in server.steps] == [1, 1, 1] and server.steps[-1].drops == [1, 2]


def test_a_row_with_drafts_has_a_mask_after_each_and_goes_on_where_its_kept_tokens_end(rows, walker):
    setups = [setup(walker, 1, 1), setup(walker, 2, 2)]
    masks, errors = step(rows, plan(1, 2), setups, [ids("4", "2"), ids("y", "e", "s")])
    assert masks == {0: DIGITS, 1: DIGITS, 2: DIGITS, 3: ids("n", "y"), 4: ids("e"), 5: ids("s"), 6: [EOS]}
    assert errors == {}
    drawn = np.array(ids("4", "7", "0", "n", 0, 0, 0), dtype=np.int32)
    rows.take(drawn, np.array([0, 3]), np.array([2, 1], dtype=np.int32))
    assert step(rows, plan(1, 2))[0] == {0: DIGITS, 1: ids("o")}  # 4 and 7 were kept, and n


def test_what_comes_after_a_draft_that_the_grammar_forbids_or_that_ends_it_is_not_masked(rows, walker):
    masks, _ = step(
        rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 2, ids("n", "o"))], [ids("x", "1"), [EOS, 5]]
    )
    assert masks[0] == DIGITS and masks[3] == [EOS]
    assert all(masks[line] == EVERYTHING for line in (1, 2, 4, 5))
    take(rows, "1", EOS)
    assert step(rows, plan(1))[0] == {0: DIGITS}


def draft_masks(rows, slots, drafts):
    """Tokens that each slot's next draft may be; None = any, for nothing is known against it."""
    masks = rows.draft_masks(slots, np.array([ids(*own) for own in drafts], dtype=np.int32).reshape(len(slots), -1))
    bits = np.unpackbits(np.ascontiguousarray(masks.bits).view(np.uint8), axis=1, bitorder="little")[:, :257]
    found = {row: np.flatnonzero(line).tolist() for row, line in zip(masks.rows.tolist(), bits, strict=True)}
    return [found.get(row) for row in range(len(slots))]


def test_drafts_are_masked_one_after_the_other_and_the_step_that_checks_them_fills_the_last_mask_only(
    rows, walker, server
):
    slots = plan(1, 2, 4)
    step(rows, slots, [setup(walker, 1, 1), setup(walker, 2, 2), free(4)])
    take(rows, "4", "n", "x")
    assert rows.has_any(slots) and rows.has_any(plan(2)) and not rows.has_any(plan(4, 5))
    assert draft_masks(rows, slots, [[], [], []]) == [DIGITS, ids("o"), None]
    assert draft_masks(rows, slots, ["2", "o", "x"]) == [DIGITS, [EOS], None]
    assert draft_masks(rows, slots, ["21", ["o", EOS], "xx"]) == [[EOS], EVERYTHING, None]
    sent = len(server.steps)
    masks, _ = step(rows, plan(2, 1), drafts=[ids("o"), ids("2", "1", EOS)])
    assert masks == {0: ids("o"), 1: [EOS], 2: DIGITS, 3: DIGITS, 4: [EOS], 5: EVERYTHING}
    assert server.steps[sent].fills == [(1, 4, ids("2", "1", EOS), 3)]
    rows.take(np.array(ids("o", EOS, "2", "7", 0, 0), dtype=np.int32), np.array([0, 2]), int32(2, 2))
    assert draft_masks(rows, plan(1), [[]]) == [[EOS]]


def test_masks_of_drafts_outlive_the_matcher(rows, walker, server):
    step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 2)])
    take(rows, "1", "n")
    assert draft_masks(rows, plan(1, 2), [[], []]) == [DIGITS, ids("o")]
    ends = iter([True])
    server.spoils = lambda slot: next(ends, False)
    assert draft_masks(rows, plan(1, 2), ["2", "o"]) == [DIGITS, [EOS]]
    ends = iter([True])
    assert step(rows, plan(1, 2), drafts=[ids("2", "3"), ids("o")]) == (
        {0: DIGITS, 1: DIGITS, 2: [EOS], 3: ids("o"), 4: [EOS]}, {},
    )  # fmt: skip
    assert server.num_started == 3


def test_an_answer_given_up_while_drafting_drafts_freely_and_is_an_error_of_the_next_step(rows, walker, server):
    step(rows, plan(1, 2), [setup(walker, 1, 1), setup(walker, 2, 3)])
    take(rows, "1", "b")
    server.spoils = lambda slot: slot == (2 if server.steps[-1].is_careful else NOBODY)
    assert draft_masks(rows, plan(1, 2), [[], []]) == [DIGITS, EVERYTHING]
    server.spoils = lambda slot: False
    masks, errors = step(rows, plan(1, 2))
    assert masks[0] == DIGITS and list(errors) == [1] and "takes too much time or crashes" in errors[1]


def test_a_forced_trigger_forces_drafts_too(rows, walker):
    args = {"trigger_token_ids": [100, 101, 102], "bound_token_id": 100}
    step(rows, plan(1), [setup(walker, 1, 2, **args)])
    take(rows, 7)
    seen = [draft_masks(rows, plan(1), [list(drafts)])[0] for drafts in ([], [100], [100, 101], [100, 101, 102])]
    assert seen == [EVERYTHING, [101], [102], EVERYTHING]


def test_drafts_stop_before_one_that_starts_the_grammar(rows, walker):
    args = {"trigger_token_ids": [100, 101], "bound_token_id": 100}
    rows.set_slots([setup(walker, 1, 2, **args), free(2), setup(walker, 3, 1)])
    drafts = np.zeros((9, 3), dtype=np.int32)
    drafts[1] = [7, 100, 101]
    slots, room = np.array([1, 2, 3], dtype=np.int32), np.array([3, 3, 3], dtype=np.int32)
    assert rows.limit_drafts(slots, drafts, room).tolist() == [2, 3, 3]
    assert rows.limit_drafts(slots, drafts, room - 2).tolist() == [1, 1, 1]
    masks, _ = step(rows, plan(1), drafts=[[7, 100]])
    assert masks == {0: EVERYTHING, 1: EVERYTHING, 2: [101]}
    take(rows, 100)
    assert step(rows, plan(1))[0] == {0: [101]}
