"""From logits to tokens: the stages, one draw, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import SlotSetup
from deepinfer.ops.table import Ops
from deepinfer.ops.transfer import to_device
from deepinfer.sampling.bad_words import BadWords
from deepinfer.sampling.before import Before
from deepinfer.sampling.bias import Bias
from deepinfer.sampling.endings import MinTokens
from deepinfer.sampling.golden import Golden
from deepinfer.sampling.logprobs import TokenLogprobs, drawn_logprobs
from deepinfer.sampling.masks import exclude_masked
from deepinfer.sampling.penalties import Penalties
from deepinfer.sampling.rejection import Proposed, keep_or_redraw
from deepinfer.sampling.slot_params import MIN_TEMPERATURE, RowParams, SlotParams
from deepinfer.sampling.stages import EXCLUDED, FILTERS, Stage
from deepinfer.structured.rows import RowMasks


class Sampled(NamedTuple):
    """One line per row, on the device of the logits. Where one of the two is False the token means nothing."""

    token_ids: Tensor  # [rows] int64
    is_finite: Tensor  # [rows] bool; False: the logits held NaN or infinity, or no finite value; the token is 0
    has_choice: Tensor | None  # [rows] bool; False: the stages excluded every token. None = nowhere
    logprobs: TokenLogprobs | None  # None when no row asks


class Drafted(NamedTuple):
    """One draft per row, on the device of the logits."""

    token_ids: Tensor  # [rows] int64
    logits: Tensor  # [rows, vocab] that they were drawn from
    logprobs: Tensor  # [rows] float32, of the likeliest token among these


class PlainDraws(NamedTuple):
    """Of some rows, on the host; a row of temperature 0 takes the likeliest token."""

    temperature: NDArray[np.float32]  # [rows]
    seeds: NDArray[np.int64]  # [rows]


def make_changes(num_slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> tuple[Stage, ...]:
    """The stages before the filters, in their order: what is excluded or biased first, then the penalties."""
    return (
        Bias(num_slots, vocab_size, device),
        BadWords(num_slots, device),
        MinTokens(eos_ids),
        Penalties(num_slots, vocab_size, device),
    )


class Sampler:
    """Chooses the next token of each row by the parameters of the row's slot.

    What a row gets depends on its logits, parameters, seed, position and the tokens before it only,
    never on its place or on the other rows.
    """

    def __init__(self, ops: Ops, num_slots: int, vocab_size: int, eos_ids: Sequence[int], device: torch.device) -> None:
        self._ops, self._vocab_size = ops, vocab_size
        self._changes = make_changes(num_slots, vocab_size, eos_ids, device)
        self._slots = SlotParams(num_slots)
        self._golden = Golden()
        self._is_plain = np.arange(num_slots) == 0  # of slots: known to need no stage any more, as the padding slot
        self._is_bare = self._is_plain.copy()  # of slots: greedy, and told no log-probabilities

    def set_slot(self, setup: SlotSetup) -> None:
        """The slot has a new occupant; its `params.seed` is not None."""
        self._slots.set(setup)
        self._is_plain[setup.slot] = False
        params = setup.params
        self._is_bare[setup.slot] = params.temperature < MIN_TEMPERATURE and params.logprobs is None
        self._golden.set_slot(setup)
        for stage in self._changes:
            stage.set_slot(setup)

    def sample(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        masks: RowMasks | None = None,
        before: Before | None = None,
        proposed: Proposed | None = None,
        best: tuple[Tensor, Tensor] | None = None,
    ) -> Sampled:
        """Choose one token per row.

        logits: [rows, vocab] float32, not changed. slots: [rows], on the host. positions: [rows]
        of the tokens to be drawn, on the host: with the seed they key the noise of the draw.
        masks: what the rows under a grammar may take; None = there are none.
        before: drafts before each row; None = no row has any. proposed: drafts that rows keep by rejection
            instead of by equality with their own draw; None = there are none.
        best: what `best_tokens` gives for these logits, if it is known.
        """
        token_ids, is_finite = best or self._ops.best_tokens(logits)
        is_free = masks is None and proposed is None
        if is_free and self._is_bare[slots].all() and self._are_plain(slots, positions):
            return Sampled(token_ids, is_finite, None, None)
        params = self._slots.rows(slots, positions, logits.shape[1], before)
        has_choice, processed = None, _run(self._changes, logits, params)
        if masks is not None:
            processed = exclude_masked(processed, masks)
        if processed is not logits:
            has_choice = ~is_finite | (processed.amax(-1) > EXCLUDED)
        is_random = params.is_random.any()
        if is_random:
            processed = _run(FILTERS, processed, params)
        if is_random or processed is not logits:
            token_ids = self._draw(processed, params).where(is_finite, 0)
        if proposed is not None:
            token_ids = keep_or_redraw(token_ids, processed, params, proposed).where(is_finite, 0)
        token_ids = self._golden.force(token_ids, params)
        logprobs = drawn_logprobs(logits, processed, token_ids, is_finite, params)
        return Sampled(token_ids, is_finite, has_choice, logprobs)

    def propose(
        self,
        logits: Tensor,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        before: Before | None,
        masks: RowMasks | None = None,
        *,
        noise: int = 0,
    ) -> Drafted:
        """Draw drafts as `sample` draws tokens.

        masks: what grammars allow there; None = there are none.
        noise: which stream the draw takes; 0 = the one of `sample`, so that good drafts equal what it will draw.
        """
        params = self._slots.rows(slots, positions, logits.shape[1], before)
        processed = _run(self._changes, logits, params)
        if masks is not None:
            processed = exclude_masked(processed, masks)
        if params.is_random.any():
            processed = _run(FILTERS, processed, params)
            token_ids = self._draw(processed, params, noise)
        else:
            token_ids, _ = self._ops.best_tokens(processed)
        return Drafted(self._golden.force(token_ids, params), processed, self._ops.best_logprobs(processed))

    def plain_draws(self, slots: NDArray[np.int32], starts: NDArray[np.int32]) -> PlainDraws | None:
        """How rows [n] draw if all do so from logits as they are, at all positions behind `starts` [n]; None if not."""
        if not self._are_plain(slots, starts + 1):
            return None
        return PlainDraws(*(self._slots.column(name)[slots] for name in ("temperature", "seed")))

    def remembers(self, slots: NDArray[np.int32]) -> bool:
        """Whether `observe` does anything for any of these slots."""
        return any(stage.remembers(slots) for stage in self._changes)

    def observe(self, slots: NDArray[np.int32], token_ids: Tensor) -> None:
        """The answers in these slots [n], all different, go on with these tokens [n] int64."""
        for stage in self._changes:
            stage.observe(slots, token_ids)

    def num_prompt_logprobs(self, slots: NDArray[np.int32]) -> int:
        """The largest number of alternatives to prompt tokens that any of these slots asks for."""
        return int(self._slots.column("prompt_logprobs")[slots].max(initial=0))

    def _are_plain(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> bool:
        """Whether rows [n] draw from logits as they are, from these positions [n] on.

        A row that no stage is for is plain until its slot gets a new occupant, so few are asked about in a step.
        """
        is_plain = self._is_plain[slots]
        if is_plain.all():
            return True
        asked = np.flatnonzero(~is_plain)
        params = self._slots.rows(slots[asked], positions[asked], self._vocab_size)
        stages, host = (*self._changes, *FILTERS), torch.device("cpu")  # nothing of what is prepared is used
        if self._golden.has_any or any(stage.prepare(params, host) is not None for stage in stages):
            return False
        self._is_plain[slots[asked]] = True
        return True

    def _draw(self, logits: Tensor, params: RowParams, noise: int = 0) -> Tensor:
        keys = params["temperature"], params["seed"], params.positions.astype(np.int64) + noise
        return self._ops.draw(logits, *(to_device(key, logits.device) for key in keys))


def _run(stages: Sequence[Stage], logits: Tensor, params: RowParams) -> Tensor:
    """Logits after these stages; the very same tensor when no row uses one of them."""
    for stage in stages:
        prepared = stage.prepare(params, logits.device)
        if prepared is not None:
            logits = stage.apply(logits, prepared)
    return logits
