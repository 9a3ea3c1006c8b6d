"""Random schedules on the null backend: invariants after every step, answers equal to the direct computation."""

import itertools
import random

import pytest

from deepinfer.backends.null.runner import NullModel
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.sampling.params import SamplingParams
from null_engine import NullEngine

NUM_SHARDS, SCHEDULES_PER_SHARD = 20, 100


class Schedule:
    """One random engine, its random requests, and what is done to them on the way."""

    def __init__(self, seed):
        self.choice = choice = random.Random(seed)
        # Half of the schedules are made for preemption: short prompts, long answers, tight pools.
        self.has_long_answers = has_long_answers = choice.random() < 0.5
        self.block_tokens = choice.choice([1, 2, 4] if has_long_answers else [1, 2, 4, 16])
        self.max_model_len = choice.choice([8, 12, 20])
        num_slots = choice.choice([2, 4, 6] if has_long_answers else [1, 2, 6])
        num_columns = -(-self.max_model_len // self.block_tokens)
        self.vocab_size = choice.choice([5, 50, 1000])
        num_spare_blocks = choice.choice([-(num_columns // 2), 0, 1 if has_long_answers else 7 * num_columns])
        self.engine = NullEngine(
            num_blocks=num_columns + num_spare_blocks,
            num_slots=num_slots,
            block_tokens=self.block_tokens,
            max_model_len=self.max_model_len,
            max_step_tokens=num_slots + choice.choice([0, 1, 3, 30]),
            max_chunk_tokens=choice.choice([None, 1, 2, 7]),
            max_prefill_tokens=choice.choice([None, 1, 4, 9]),
            max_queue=choice.choice([2, 100, 100]),
            depth=choice.choice([1, 2, 2, 3]),
            model=NullModel(
                self.vocab_size,
                stop_probability=choice.choice([0.0, 0.05]),
                broken_token=choice.choice([None, None if has_long_answers else 4]),
            ),
            eos_token_ids=choice.choice([(), (0,), (0, 3)]),
            decoder_replay=choice.choice(["full", "bounded"]),
            replay_keep_tokens=choice.choice([1, 5]),
            num_drafts=choice.choice([0, 1, 3, 5]),
            seed=seed,
        )
        self.to_come = [f"r{number}" for number in range(choice.randint(1, 7))]
        self.text_stops = {}  # request -> tokens after which the frontend ends it
        self.interfered = set()
        self.refused = set()
        self.work = 0
        self.num_drains = 0  # steps that end with a preempted request whose tokens are in flight

    def run(self):
        num_steps = 0
        while self.to_come or self.engine.scheduler.has_work():
            self.add_some()
            self.interfere()
            num_steps += self.engine.scheduler.has_work()
            self.engine.step()
            self.num_drains += len(self.engine.scheduler._table.draining)
            assert num_steps <= 20 * (self.work + len(self.engine.answers) + 1), "requests starve"
        self.check_answers()

    def add_some(self):
        everything_at_once = self.has_long_answers or self.choice.random() < 0.3
        while self.to_come and (everything_at_once or self.choice.random() < 0.6):
            self.add(self.to_come.pop(), *self.draw_request())

    def draw_request(self):
        """Prompt, and the other arguments of `add`."""
        choice = self.choice
        is_score = choice.random() < 0.15
        is_short = self.has_long_answers and not is_score
        num_prompt = choice.randint(1, 3 if is_short else self.max_model_len - 1)
        fitting = min(self.max_model_len, self.engine.cache.num_blocks * self.block_tokens + 1) - num_prompt
        longest = max(1, fitting if choice.random() < 0.9 else self.max_model_len)
        shortest = max(1, min(longest, fitting)) if is_short else 1
        num_stop_tokens = 0 if self.has_long_answers else choice.choice([0, 0, 1, 3])
        params = SamplingParams(
            max_tokens=1 if is_score else choice.randint(shortest, longest),
            seed=choice.randint(0, 3),
            ignore_eos=self.has_long_answers or choice.random() < 0.5,
            stop_token_ids=tuple(choice.sample(range(self.vocab_size), num_stop_tokens)),
            logprobs=choice.choice([None, None, 0, 2]),
        )
        prompt = [choice.randrange(self.vocab_size) for _ in range(num_prompt)]
        return prompt, params, choice.choice([0, 0, 1, -1]), is_score

    def add(self, name, prompt, params, priority, is_score):
        engine = self.engine
        num_tokens = len(prompt) + params.max_tokens
        num_blocks = -(-(num_tokens - 1) // self.block_tokens)
        fits = num_tokens <= self.max_model_len and num_blocks <= engine.cache.num_blocks
        try:
            engine.add(name, prompt, params, priority=priority, is_score=is_score)
        except QueueFullError:
            assert fits and engine.scheduler.num_waiting >= 2
            self.refused.add(name)
        except RequestError:
            assert not fits
            self.refused.add(name)
        else:
            assert fits
            self.work += num_tokens
            if self.choice.random() < 0.2:
                self.text_stops[name] = self.choice.randint(1, 9)
            with pytest.raises(RequestError, match="is in use"):
                engine.scheduler.add(engine.answers[name].request)

    def interfere(self):
        engine, choice = self.engine, self.choice
        for name, count in list(self.text_stops.items()):
            if len(engine.tokens(name)) >= count:
                del self.text_stops[name]
                self.end(name, "stop")
        if engine.answers and choice.random() < 0.05:
            self.end(choice.choice(list(engine.answers)), "abort")

    def end(self, name, reason):
        scheduler = self.engine.scheduler
        was_alive = self.engine.reason(name) is None
        done = scheduler.finish(name, "abort") if reason == "abort" else scheduler.finish(name, reason)
        assert done == was_alive
        assert not scheduler.finish(name, "abort"), "a request ended twice"
        scheduler.check()
        self.engine.take_ends(scheduler.take_finished())
        if was_alive:
            self.interfered.add(name)
            assert self.engine.reason(name) == reason

    def check_answers(self):
        engine = self.engine
        assert engine.cache.num_free_blocks == engine.cache.num_blocks
        assert engine.cache.num_free_slots == engine.cache.num_slots
        assert not engine.scheduler.take_finished() and engine.scheduler.schedule() is None
        for name, answer in engine.answers.items():
            tokens, reason, stop_token = engine.expected(name)
            finished, prompt = answer.finished, answer.request.token_ids
            assert finished is not None, f"{name} was never answered"
            if name in self.interfered:
                assert answer.tokens == tokens[: len(answer.tokens)]
            else:
                assert (answer.tokens, finished.reason, finished.stop_token) == (tokens, reason, stop_token)
                assert (finished.error is not None) == (reason == "error")
            if answer.request.params.logprobs is not None:
                assert answer.logprobs == [-float(token) for token in answer.tokens]
            if not answer.request.wants_prompt_logits:
                assert answer.logit_positions == []
            elif name in self.interfered:
                assert answer.logit_positions == list(range(len(answer.logit_positions)))
            elif reason != "error":
                assert answer.logit_positions == list(range(len(prompt)))


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_random_schedules_answer_every_request_once_and_as_computed_directly(shard):
    for seed in range(shard * SCHEDULES_PER_SHARD, (shard + 1) * SCHEDULES_PER_SHARD):
        try:
            Schedule(seed).run()
        except BaseException as error:
            error.add_note(f"schedule seed {seed}")
            raise


def test_random_schedules_reach_every_path():
    """Preemption, drains, refusals, all ends, rests of drafting do occur in a sample of the schedules above."""
    reasons, num_preemptions, num_refused, num_drains, num_rests = set(), 0, 0, 0, 0
    for seed in range(80):
        schedule = Schedule(seed)
        schedule.run()
        answers = schedule.engine.answers.values()
        reasons |= {answer.finished.reason for answer in answers}
        num_preemptions += schedule.engine.scheduler.num_preemptions
        num_refused += len(schedule.refused)
        num_drains += schedule.num_drains
        history = schedule.engine.history
        num_rests += sum(
            one.is_plain and bool((after.counts[~after.is_prefill] > 1).any())
            for one, after in itertools.pairwise(history)
        )
    assert reasons == {"stop", "length", "abort", "error"}
    assert num_preemptions > 10 and num_refused > 20 and num_drains > 0 and num_rests > 5
