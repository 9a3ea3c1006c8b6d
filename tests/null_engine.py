"""A small engine loop on the null backend that checks every invariant after each step."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from deepinfer.backends.null.runner import NullModel, NullRunner
from deepinfer.cache.manager import CacheManager
from deepinfer.config.engine import SchedulerOptions
from deepinfer.messages import Finished, GenerateRequest
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.scheduler import Scheduler


@dataclass
class Answer:
    """All that came back for one request."""

    request: GenerateRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logit_positions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finished: Finished | None = None


class NullEngine:
    """Scheduler and null runner with up to `depth` plans in flight; time is the number of clock readings."""

    def __init__(
        self,
        *,
        num_blocks=100,
        num_slots=4,
        block_tokens=4,
        max_model_len=64,
        max_step_tokens=32,
        max_chunk_tokens=None,
        max_prefill_tokens=None,
        max_queue=100,
        depth=1,
        model=None,
        eos_token_ids=(0,),
        num_drafts=0,
        seed=0,
        **scheduler_options,
    ):
        self.model = model or NullModel(vocab_size=1000)
        self.cache = CacheManager(num_blocks, num_slots, block_tokens, max_model_len)
        self.time = 0.0
        self.scheduler = Scheduler(
            SchedulerOptions(num_slots, max_step_tokens, max_chunk_tokens, max_prefill_tokens, max_queue),
            self.cache,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
            vocab_size=self.model.vocab_size,
            clock=self.clock,
            num_drafts=num_drafts,
            **scheduler_options,
        )
        self.runner = NullRunner(
            self.model,
            num_slots=num_slots,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            max_model_len=max_model_len,
            num_drafts=num_drafts,
            seed=seed,
        )
        self.depth = depth
        self.plans = deque()
        self.history = []  # every plan
        self.answers: dict[str, Answer] = {}

    def clock(self):
        self.time += 1.0
        return self.time

    def add(self, name, prompt, params=None, *, priority=0, is_score=False, **fields):
        """Add a request; `prompt` is a list of tokens or their number, `fields` are sampling parameters."""
        tokens = list(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
        params = params or SamplingParams(**{"max_tokens": 4, "seed": 0} | fields)
        request = GenerateRequest(name, np.array(tokens, dtype=np.int32), params, self.clock(), priority, is_score)
        self.scheduler.add(request)
        self.answers[name] = Answer(request)
        self.scheduler.check()

    def plan(self):
        """Plan one step, if there is something to compute."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is not None:
            self.plans.append(plan)
            self.history.append(plan)
        return plan

    def finish_oldest(self):
        """Execute the oldest plan and take its result."""
        output = self.scheduler.update(self.runner.execute(self.plans.popleft()))
        self.scheduler.check()
        for row, (name, token) in enumerate(zip(output.request_ids, output.token_ids.tolist(), strict=True)):
            answer = self.answers[name]
            assert answer.finished is None, f"{name} got a token after its end"
            answer.tokens.append(token)
            if output.logprobs is not None:
                answer.logprobs.append(float(output.logprobs.values[row]))
        for name, start, logits in output.prompt_logits:
            assert logits.shape[1] == self.model.vocab_size and logits[0, 0] == start
            self.answers[name].logit_positions += logits[:, -1].astype(int).tolist()
        for name, start, lines in output.prompt_logprobs:
            assert start == 1 + len(self.answers[name].prompt_logprobs), f"{name} misses prompt tokens"
            self.answers[name].prompt_logprobs += lines.values.tolist()
        self.take_ends(output.finished)
        return output

    def take_ends(self, finished):
        for end in finished:
            answer = self.answers[end.request_id]
            assert answer.finished is None, f"{end.request_id} ended twice"
            answer.finished = end

    def step(self):
        """Plan until `depth` plans are in flight, then take one result; False when nothing is left to do."""
        while len(self.plans) < self.depth and self.plan() is not None:
            pass
        if self.plans:
            self.finish_oldest()
        self.take_ends(self.scheduler.take_finished())
        assert self.plans or self.scheduler.num_in_flight == 0
        return self.scheduler.has_work()

    def run(self, max_steps=1000):
        """Step until everything ended; returns the number of steps."""
        for step in range(max_steps):
            if not self.step():
                assert self.cache.num_free_blocks == self.cache.num_blocks
                assert self.cache.num_free_slots == self.cache.num_slots
                return step + 1
        raise AssertionError(f"still at work after {max_steps} steps")

    def tokens(self, name):
        return self.answers[name].tokens

    def reason(self, name):
        finished = self.answers[name].finished
        return None if finished is None else finished.reason

    def direct(self, name):
        """The whole answer of a request, computed alone and without a schedule."""
        request = self.answers[name].request
        return self.model.answer(request.token_ids, request.params.seed, request.params.max_tokens)

    def expected(self, name):
        """Tokens, reason and stop token that a request must end with if nobody interferes."""
        request, tokens = self.answers[name].request, []
        for token in self.direct(name):
            if token == self.model.broken_token:
                return tokens, "error", None
            tokens.append(token)
            is_eos = self.scheduler._state._is_eos[token] and not request.params.ignore_eos
            if is_eos or token in request.params.stop_token_ids:
                return tokens, "stop", token
        return tokens, "length", None
