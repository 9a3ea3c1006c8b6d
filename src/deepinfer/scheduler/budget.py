"""Who gets tokens in a step: decode rows first, then prefill chunks in order of admission."""

from __future__ import annotations


class StepBudget:
    """Tokens that one step can still take.

    max_step_tokens: all tokens of the step. max_chunk_tokens: prompt tokens of one request.
    Running requests keep their pace, since every decode row takes its token before any chunk.
    """

    def __init__(self, max_step_tokens: int, max_chunk_tokens: int) -> None:
        self._left = max_step_tokens
        self._max_chunk_tokens = max_chunk_tokens

    @property
    def left(self) -> int:
        return self._left

    def take_decode(self, num_rows: int) -> None:
        """One token for each decode row; they always fit (SchedulerOptions sees to it)."""
        assert num_rows <= self._left, f"{num_rows} decode rows but {self._left} tokens in the step"
        self._left -= num_rows

    def take_chunk(self, num_wanted: int) -> int:
        """Tokens for the next prefill chunk, at most `num_wanted`; 0 when the step is full."""
        count = min(num_wanted, self._max_chunk_tokens, self._left)
        self._left -= count
        return count
