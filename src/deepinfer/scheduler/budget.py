"""Who gets tokens in a step: decode rows first, then prefill chunks in order of admission."""

from __future__ import annotations

from collections.abc import Callable


class StepBudget:
    """Tokens that one step can still take.

    max_step_tokens: all tokens of the step. max_chunk_tokens: prompt tokens of one request. max_prefill_tokens: of all
    requests. Running requests keep their pace, since every decode row takes its token before any chunk, and a step
    takes longer with every prompt token in it.
    """

    def __init__(self, max_step_tokens: int, max_chunk_tokens: int, max_prefill_tokens: int) -> None:
        self._left = max_step_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._prefill_left = max_prefill_tokens

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that still fit, unless a larger image is among them."""
        return min(self._left, self._prefill_left)

    def drafts_per_row(self, num_rows: int, num_drafts: int, *, is_shared: bool) -> int:
        """Drafts that each of the decode rows can check, at most `num_drafts`.

        is_shared: prompts wait for tokens of the step too; drafts leave them half of it.
        """
        if num_rows == 0 or num_drafts == 0:
            return 0
        left = self._left - num_rows
        return min(num_drafts, (left // 2 if is_shared else left) // num_rows)

    def take_decode(self, num_tokens: int) -> None:
        """The tokens of decode rows; one for each always fits (SchedulerOptions sees to it)."""
        assert num_tokens <= self._left, f"decode rows have {num_tokens} tokens but the step {self._left}"
        self._left -= num_tokens

    def take_chunk(self, num_wanted: int, whole: Callable[[int], int] | None = None) -> int:
        """Tokens for the next prefill chunk, at most `num_wanted`; 0 when the step has no room for it.

        whole: from a number of tokens to one that cuts no image, at most `num_wanted`; an image may be larger
            than a chunk and than what is left for prompts, but has to fit in what is left of the step.
        """
        count = min(num_wanted, self._max_chunk_tokens, self.prefill_left)
        if whole is not None and (count := whole(count)) > self._left:
            count = 0
        self._left -= count
        self._prefill_left = max(0, self._prefill_left - count)
        return count
