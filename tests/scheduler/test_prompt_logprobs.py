"""Each prompt token but the first is scored once, whatever the chunks and preemptions."""

import dataclasses

import numpy as np
import pytest

from deepinfer.backends.null.runner import NullModel
from null_engine import NullEngine


def scores(engine, name):
    """What the null runner says of the prompt's tokens."""
    return [-float(token) for token in engine.answers[name].request.token_ids[1:]]


@pytest.mark.parametrize("chunk", [None, 1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_prompt_token_is_scored_once_in_any_chunks(chunk, depth):
    engine = NullEngine(max_chunk_tokens=chunk, depth=depth)
    for number, length in enumerate([1, 2, 11, 17]):
        engine.add(f"r{number}", list(range(number, number + length)), prompt_logprobs=number)
    engine.add("plain", 9)
    engine.run()
    assert [engine.answers[f"r{n}"].prompt_logprobs == scores(engine, f"r{n}") for n in range(4)] == [True] * 4
    assert engine.answers["plain"].prompt_logprobs == []
    assert all(engine.tokens(name) == engine.direct(name) for name in engine.answers)


@pytest.mark.parametrize("seed", range(5))
def test_preempted_requests_do_not_score_twice(seed):
    draw = np.random.default_rng(seed)
    engine = NullEngine(num_blocks=8, num_slots=4, max_step_tokens=8, depth=2)
    for number in range(6):
        length = int(draw.integers(1, 12))
        engine.add(f"r{number}", draw.integers(1, 900, length).tolist(), max_tokens=12, prompt_logprobs=1)
    engine.run()
    assert engine.scheduler.num_preemptions > 0
    assert all(engine.answers[name].prompt_logprobs == scores(engine, name) for name in engine.answers)


def test_a_scored_prompt_passes_every_layer():
    engine = NullEngine(decoder_replay="bounded", replay_keep_tokens=4)
    engine.add("scored", 12, prompt_logprobs=0)
    engine.add("plain", 12)
    assert engine.plan().decoder_starts.tolist() == [0, 8]


def spoil(engine, value, has_choice=True):
    """The next results hold this value in the place of log-probabilities, and this in that of a choice."""
    execute = engine.runner.execute

    def executed(plan):
        result = execute(plan)
        if result.prompt_logprobs is not None:
            result.prompt_logprobs.values[1] = value
        return dataclasses.replace(result, has_choice=np.full(len(result.token_ids), has_choice))

    engine.runner.execute = executed


def test_a_prompt_whose_logits_are_not_finite_ends_alone():
    engine = NullEngine()
    spoil(engine, np.nan)
    engine.add("bad", 5, prompt_logprobs=0)
    engine.add("good", 5)
    engine.run()
    assert (engine.reason("bad"), engine.reason("good")) == ("error", "length")
    assert (
        "ends after 0 tokens: the model gave NaN or no finite logit for position 2"
        in engine.answers["bad"].finished.error
    )
    assert engine.scheduler.num_not_finite == 1


def test_an_impossible_token_is_no_fault_of_the_model():
    engine = NullEngine()
    spoil(engine, -np.inf)
    engine.add("good", 5, prompt_logprobs=0)
    engine.run()
    assert engine.reason("good") == "length" and engine.answers["good"].prompt_logprobs[1] == -np.inf


def test_a_request_without_a_choice_ends_with_the_reason():
    engine = NullEngine()
    spoil(engine, 0.0, has_choice=False)
    engine.add("stuck", 5)
    engine.run()
    assert engine.reason("stuck") == "error" and engine.tokens("stuck") == []
    error = engine.answers["stuck"].finished.error
    assert "its own parameters exclude every token of the vocabulary at position 5" in error
    assert engine.scheduler.num_not_finite == 0


def test_requests_whose_logits_are_not_finite_are_counted():
    model = NullModel(vocab_size=1000)
    engine = NullEngine(model=dataclasses.replace(model, broken_token=model.answer(np.array([1, 2, 3]), 0, 1)[0]))
    engine.add("bad", [1, 2, 3])
    engine.add("good", [1, 2, 4])
    engine.run()
    assert (engine.reason("bad"), engine.scheduler.num_not_finite) == ("error", 1)
