"""Sampling by the book: one row at a time, from the lists of its tokens, with plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from deepinfer.messages import TokenSequences
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.slot_params import MIN_TEMPERATURE

EXCLUDED = -math.inf


@dataclass
class Row:
    """A request as the reference sees it."""

    params: SamplingParams
    prompt: list[int]
    bad_words: TokenSequences = ()
    eos_ids: tuple[int, ...] = (0,)
    answer: list[int] = field(default_factory=list)

    def changed(self, logits: list[float]) -> list[float]:
        """Logits after everything but filters and temperature."""
        params, result = self.params, list(logits)
        allowed = range(len(logits)) if params.allowed_token_ids is None else set(params.allowed_token_ids)
        for token in range(len(result)):
            if token not in allowed:
                result[token] = EXCLUDED
        for token, bias in params.logit_bias:
            result[token] += bias
        for *beginning, last in self.bad_words:
            if not beginning or self.answer[-len(beginning) :] == beginning:
                result[last] = EXCLUDED
        if len(self.answer) < params.min_tokens:
            for token in (*self.eos_ids, *params.stop_token_ids):
                result[token] = EXCLUDED
        counts = Counter(self.answer)
        for token in {*self.prompt, *self.answer}:
            result[token] *= params.repetition_penalty if result[token] <= 0 else 1 / params.repetition_penalty
        for token, count in counts.items():
            result[token] -= params.frequency_penalty * count + params.presence_penalty
        return result

    def logprobs(self, logits: list[float]) -> list[float]:
        """Log-probabilities that tokens are drawn by; without filters."""
        temperature = 1.0 if self.params.temperature < MIN_TEMPERATURE else self.params.temperature
        scaled = [logit / temperature for logit in self.changed(logits)]
        best = max(scaled)
        total = best + math.log(sum(math.exp(logit - best) for logit in scaled))
        return [logit - total for logit in scaled]
