import dataclasses

import numpy as np
import pytest

from deepinfer.backends.null.runner import NullModel, NullRunner
from deepinfer.messages import SlotSetup, StepPlan
from deepinfer.sampling.params import SamplingParams

MODEL = NullModel(vocab_size=50)


def runner(model=MODEL):
    return NullRunner(model, num_slots=3, num_blocks=6, block_tokens=4, max_model_len=12)


def int32(*values):
    return np.array(values, dtype=np.int32)


def plan(step, rows, tokens=(), table=(), setups=(), known=None, **params):
    """rows: (slot, start, count, is_prefill, samples); table: (slot, column, block); known: tokens in the setup."""
    known = int32(*(tokens if known is None else known))
    slots, starts, counts, is_prefill, samples = map(np.array, zip(*rows, strict=True))
    table_slots, table_columns, table_blocks = zip(*table, strict=True) if table else ((), (), ())
    return StepPlan(
        step=step,
        slots=slots.astype(np.int32),
        starts=starts.astype(np.int32),
        counts=counts.astype(np.int32),
        decoder_starts=np.zeros(len(rows), dtype=np.int32),
        is_prefill=is_prefill,
        samples=samples,
        wants_logits=np.zeros(len(rows), dtype=np.bool_),
        host_tokens=int32(*tokens),
        table_slots=int32(*table_slots),
        table_columns=int32(*table_columns),
        table_blocks=int32(*table_blocks),
        setups=[
            SlotSetup(slot, SamplingParams(**{"seed": 5, "max_tokens": 40} | params), len(known), known)
            for slot in setups
        ],
    )


def prefill(step=1, slot=1, tokens=(7, 8, 9), block=1, **params):
    return plan(step, [(slot, 0, len(tokens), True, True)], tokens, [(slot, 0, block)], [slot], **params)


def decode(step, slot=1, start=3, **fields):
    return plan(step, [(slot, start, 1, False, True)], **fields)


def test_tokens_equal_the_direct_computation_in_chunks_and_steps():
    device = runner()
    expected = MODEL.answer(int32(7, 8, 9, 10, 11), 5, 3)
    table = [(1, 0, 4), (1, 1, 2)]
    assert len(device.execute(plan(1, [(1, 0, 2, True, False)], (7, 8), table, [1], (7, 8, 9, 10, 11))).token_ids) == 0
    tokens = device.execute(plan(2, [(1, 2, 3, True, True)], (9, 10, 11))).token_ids.tolist()
    for step, start in [(3, 5), (4, 6)]:
        tokens += device.execute(decode(step, start=start)).token_ids.tolist()
    assert tokens == expected


def test_tokens_depend_on_every_earlier_token_its_place_and_the_seed():
    prompts = [(7, 8, 9), (7, 9, 8), (6, 8, 9), (7, 8), (7, 8, 9, 0), (0, 7, 8, 9)]
    answers = [tuple(MODEL.answer(int32(*prompt), 5, 8)) for prompt in prompts]
    answers.append(tuple(MODEL.answer(int32(7, 8, 9), 6, 8)))
    assert len(set(answers)) == len(answers)


def test_tokens_spread_over_the_vocabulary():
    tokens = MODEL.answer(int32(1), 0, 2000)
    counts = np.bincount(tokens, minlength=50)
    assert counts.min() > 15 and counts.max() < 80


def test_stop_probability_raises_the_share_of_the_stop_token():
    tokens = NullModel(vocab_size=50, stop_token=3, stop_probability=0.25).answer(int32(1), 0, 2000)
    assert 0.22 < tokens.count(3) / 2000 < 0.31


def test_the_broken_token_is_reported_as_not_finite():
    token = MODEL.answer(int32(7, 8, 9), 5, 1)[0]
    assert runner().execute(prefill()).is_finite.tolist() == [True]
    broken = dataclasses.replace(MODEL, broken_token=token)
    assert runner(broken).execute(prefill()).is_finite.tolist() == [False]


def test_prompt_logits_hold_their_position():
    device, step = runner(), prefill()
    step.wants_logits[:] = True
    logits = device.execute(step).prompt_logits
    assert list(logits) == [0]
    assert logits[0].shape == (3, 50) and logits[0].dtype == np.float32
    assert logits[0][:, 17].tolist() == [0.0, 1.0, 2.0]


def test_logprobs_come_only_when_a_row_wants_them():
    assert runner().execute(prefill()).logprobs is None
    logprobs = runner().execute(prefill(logprobs=3)).logprobs
    token = MODEL.answer(int32(7, 8, 9), 5, 1)[0]
    assert (logprobs.values.tolist(), logprobs.ranks.tolist()) == ([-float(token)], [1])
    assert logprobs.top_ids.tolist() == [[token, token + 1, token + 2]] and logprobs.top_values.shape == (1, 3)


def scored(step, row, count, targets):
    return dataclasses.replace(
        step, logprob_rows=int32(row), logprob_counts=int32(count), logprob_targets=int32(*targets)
    )


def test_logprobs_of_prompt_tokens_are_those_of_the_targets():
    logprobs = runner().execute(scored(prefill(prompt_logprobs=1), 0, 2, (8, 9))).prompt_logprobs
    assert (logprobs.values.tolist(), logprobs.top_ids.tolist()) == ([-8.0, -9.0], [[8], [9]])
    assert runner().execute(prefill(prompt_logprobs=1)).prompt_logprobs is None


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (scored(prefill(), 0, 2, (8, 9)), "nobody asked for"),
        (scored(prefill(prompt_logprobs=1), 0, 4, (8, 9, 0, 0)), "it does not have"),
        (prefill(known=(7, 8, 8)), "setup and its prefill have different tokens"),
    ],
)
def test_scores_and_setups_that_do_not_fit_are_caught(step, message):
    with pytest.raises(AssertionError, match=message):
        runner().execute(step)


def test_a_freed_block_and_slot_serve_the_next_occupant():
    device = runner()
    device.execute(prefill())
    tokens = device.execute(prefill(2, slot=1, tokens=(1, 2), block=1)).token_ids.tolist()
    assert tokens == MODEL.answer(int32(1, 2), 5, 1)
    moved = [(1, 0, 0), (2, 0, 1)]
    device.execute(plan(3, [(2, 0, 2, True, True)], (1, 2), moved, [2]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (decode(3), "step 3 came, step 2 was due"),
        (decode(2, start=4), "do not continue"),
        (decode(2, start=2), "do not continue"),
        (decode(2, slot=2, start=0), "without an occupant"),
        (decode(2, slot=0, start=0), "without an occupant"),
        (plan(2, [(1, 3, 1, True, True)], (5,)), "prefill after the first sample"),
        (plan(2, [(2, 0, 1, False, True)], table=[(2, 0, 2)], setups=[2]), "decode before it"),
        (plan(2, [(1, 3, 1, False, True)] * 2), "share a slot"),
        (plan(2, [(1, 3, 2, False, True)]), "wrong number of tokens"),
        (plan(2, [(2, 0, 2, True, True)], (5,), [(2, 0, 2)], [2]), "host tokens and prefill rows differ"),
        (plan(2, [(2, 0, 1, True, True)], (50,), [(2, 0, 2)], [2]), "out of range"),
        (plan(2, [(2, 0, 1, True, True), (1, 3, 1, False, True)], (5,), [(2, 0, 2)], [2]), "after a prefill row"),
        (plan(2, [(2, 0, 5, True, True)], range(5), [(2, 0, 2)], [2]), "padding block"),
        (plan(2, [(2, 0, 13, True, True)], range(13), [(2, 0, 2)], [2]), "wrong number of tokens"),
        (plan(2, [(2, 0, 1, True, True)], (5,), [(2, 0, 1)], [2]), "another one's table names it"),
        (plan(2, [(1, 3, 1, False, True)], (), [(2, 0, 3), (3, 0, 3)]), "given to two slots"),
        (plan(2, [(1, 3, 1, False, True)], (), [(2, 0, 3), (2, 0, 4)]), "changed twice"),
        (decode(2, table=[(0, 0, 2)]), "padding slot"),
        (decode(2, table=[(1, 0, 2)]), "another request wrote"),
        (decode(2, setups=[4]), "slot 4 does not exist"),
        (dataclasses.replace(decode(2), decoder_starts=int32(2)), "decoder start moved"),
    ],
)
def test_plans_that_a_device_would_suffer_from_are_caught(bad, message):
    device = runner()
    device.execute(prefill())
    with pytest.raises(AssertionError, match=message):
        device.execute(bad)
