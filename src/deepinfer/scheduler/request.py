"""Request: what the host keeps about one request, touched only when something happens to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer.images.messages import ImageSpan
from deepinfer.messages import Int32, RequestTimes, SlotSetup, TokenSequences
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import CompiledGrammar


@dataclass(slots=True, eq=False)
class Request:
    """One request from its arrival to its end; what changes every step lies in `SlotState`.

    sequence: number of its arrival; orders requests of one priority, also after a preemption.
    decoder_start: position from which its tokens pass the decoder half, fixed at arrival.
    generated: the sampled tokens that the host knows.
    slot: 0 = it holds none.
    num_logits, num_logprobs: prompt positions of which they were handed out.
    """

    request_id: str
    prompt: Int32
    params: SamplingParams
    priority: int
    arrival: float
    sequence: int
    decoder_start: int
    wants_prompt_logits: bool
    bad_word_ids: TokenSequences = ()
    grammar: CompiledGrammar | None = None
    images: tuple[ImageSpan, ...] = ()
    generated: list[int] = field(default_factory=list)
    slot: int = 0
    num_logits: int = 0
    num_logprobs: int = 0
    num_preemptions: int = 0
    num_checked_drafts: int = 0
    num_accepted_drafts: int = 0
    scheduled: float | None = None
    first_token: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and answer so far."""
        return len(self.prompt) + len(self.generated)

    @property
    def limit(self) -> int:
        """Positions computed at most: all but that of the last token of the longest answer."""
        assert self.params.max_tokens is not None, "max_tokens is filled in by the frontend"
        return len(self.prompt) + self.params.max_tokens - 1

    def tokens(self, start: int, end: int) -> Int32:
        """Known tokens at positions start .. end - 1, int32."""
        num_prompt = len(self.prompt)
        if end <= num_prompt:
            return self.prompt[start:end]
        generated = self.generated[max(0, start - num_prompt) : end - num_prompt]
        return np.concatenate((self.prompt[start:], np.array(generated, dtype=np.int32)))

    def setup(self) -> SlotSetup:
        """What the device must know when the request enters its slot."""
        known = self.tokens(0, self.num_tokens)
        return SlotSetup(self.slot, self.params, len(self.prompt), known, self.bad_word_ids, self.grammar)

    def times(self, finished: float) -> RequestTimes:
        return RequestTimes(self.arrival, self.scheduled, self.first_token, finished)
