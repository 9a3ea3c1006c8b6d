"""NullRunner: runs plans without a model, and checks them as a device would suffer from them.

It keeps what a device keeps (block table, who wrote each block, how far each slot is, the last
token, which positions its rings hold) and asserts that every plan fits to it. The token at a position is a
hash of the request's seed and all tokens before it, so any mistake in chunking, batching, preemption or the
order of steps changes the answer. Drafts are right by chance: each row checks as many as it may, or fewer,
and keeps a random number of them; now and then it wants none for some steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepinfer.backends.null.images import NullEncoder
from deepinfer.messages import Bool, Float32, Int32, Logprobs, SlotSetup, StepPlan, StepResult
from deepinfer.speculate.progress import SlotProgress

UInt64 = NDArray[np.uint64]

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(32)
FLIP_PROBABILITY = 0.2  # of a step after which drafts are no longer wanted, or are again


@dataclass(frozen=True)
class NullModel:
    """What the tokens look like.

    stop_token: drawn with `stop_probability` at every position, besides its share of the others.
    broken_token: a draw of it counts as logits without a finite value; None = never.
    window, lookback: positions before a row's start that it reads in its rings, and rows of a partial group.
    """

    vocab_size: int
    stop_token: int = 0
    stop_probability: float = 0.0
    broken_token: int | None = None
    window: int = 16
    lookback: int = 3

    def history(self, tokens: Int32, before: UInt64) -> UInt64:
        """Hash [] of a stretch of tokens [n] after the history `before` [1]; 0 = no history."""
        powers = np.cumprod(np.full(len(tokens), _FACTOR))  # wraps, as intended
        own = ((tokens.astype(np.uint64) + np.uint64(1)) * np.append(powers[-2::-1], np.uint64(1))).sum()
        history: UInt64 = before * powers[-1] + own
        return history

    def draw(self, history: UInt64, seeds: UInt64) -> Int32:
        """The token after each history [n], int32."""
        bits = (history ^ (seeds * _MIX)) * _FACTOR
        bits = (bits ^ (bits >> _SHIFT)) * _MIX
        bits ^= bits >> _SHIFT
        tokens = (bits % np.uint64(self.vocab_size)).astype(np.int32)
        chance = (bits * _FACTOR >> np.uint64(11)) * 2.0**-53
        return np.where(chance < self.stop_probability, np.int32(self.stop_token), tokens)

    def answer(self, prompt: Int32, seed: int, num_tokens: int) -> list[int]:
        """The first tokens after a prompt, one by one: what any schedule must give."""
        tokens: list[int] = []
        history = self.history(np.asarray(prompt, dtype=np.int32), np.zeros(1, dtype=np.uint64))
        for _ in range(num_tokens):
            token = self.draw(history, np.array([seed], dtype=np.uint64))
            history = self.history(token, history)
            tokens.append(int(token[0]))
        return tokens


class NullRunner:
    """Executes plans in order; broken invariants of the scheduler are AssertionErrors here."""

    def __init__(
        self,
        model: NullModel,
        *,
        num_slots: int,
        num_blocks: int,
        block_tokens: int,
        max_model_len: int,
        num_drafts: int = 0,
        seed: int = 0,
        encoder: NullEncoder | None = None,
    ) -> None:
        """num_drafts: drafts that a row can check; how many are checked and kept follows `seed`."""
        num_columns = -(-max_model_len // block_tokens)
        self._model, self._encoder = model, encoder
        self._block_tokens = block_tokens
        self._max_model_len = max_model_len
        self._table = np.zeros((num_slots + 1, num_columns), dtype=np.int32)
        self._owner = np.zeros(num_blocks + 1, dtype=np.int32)  # slot whose row names the block, 0 = none
        self._writer = np.zeros(num_blocks + 1, dtype=np.int64)  # occupant that wrote the block
        self._occupant = np.zeros(num_slots + 1, dtype=np.int64)  # number of the slot's last setup
        self._num_computed = np.zeros(num_slots + 1, dtype=np.int32)
        self._decoder_start = np.zeros(num_slots + 1, dtype=np.int32)
        self._token = np.full(num_slots + 1, -1, dtype=np.int32)  # sampled for position num_computed, -1 = none
        self._history = np.zeros(num_slots + 1, dtype=np.uint64)
        self._seed = np.zeros(num_slots + 1, dtype=np.uint64)
        self._num_logprobs = np.full(num_slots + 1, -1, dtype=np.int32)  # -1 = none wanted
        self._num_prompt_logprobs = np.full(num_slots + 1, -1, dtype=np.int32)
        self._known: dict[int, Int32] = {}  # tokens in each slot's setup
        self._progress = SlotProgress(num_slots)
        self._num_drafts, self._wants_drafts = num_drafts, num_drafts > 0
        self._random = np.random.default_rng(seed)
        # Position that each place of the rings holds, by slot; -1 = none.
        self._window_ring = np.full((num_slots + 1, model.window + num_drafts), -1, dtype=np.int64)
        self._group_ring = np.full((num_slots + 1, model.lookback + num_drafts), -1, dtype=np.int64)
        self._num_setups = 0
        self._num_steps = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Check a plan, run it, and give its tokens.

        Prompt logits hold their position in every column. Log-probabilities are minus the token id.
        """
        self._num_steps += 1
        assert plan.step == self._num_steps, f"step {plan.step} came, step {self._num_steps} was due"
        for setup in plan.setups:
            self._set_up(setup)
        self._change_table(plan)
        plan = self._resolve(plan)
        self._check_rows(plan)
        self._check_blocks(plan)
        self._use_rings(plan)
        if self._encoder is not None:
            self._encoder.check(plan)
        self._compute(plan)
        tokens, num_tokens = self._draw(plan)
        slots = np.repeat(plan.slots[plan.samples], num_tokens)
        self._wants_drafts ^= self._num_drafts > 0 and self._random.random() < FLIP_PROBABILITY
        return StepResult(
            plan.step,
            tokens,
            self._is_finite(tokens),
            self._logprobs(self._num_logprobs[slots], tokens),
            self._logits(plan),
            prompt_logprobs=self._prompt_logprobs(plan),
            num_computed=plan.num_tokens,
            num_tokens=None if plan.is_plain else num_tokens,
            num_checked=None if plan.is_plain else np.where(plan.is_prefill, 0, plan.counts - 1)[plan.samples],
            wants_drafts=self._wants_drafts,
        )

    def _set_up(self, setup: SlotSetup) -> None:
        slot, params = setup.slot, setup.params
        assert 0 < slot < len(self._token), f"slot {slot} does not exist"
        self._num_setups += 1
        self._occupant[slot] = self._num_setups
        self._num_computed[slot] = 0
        self._token[slot] = -1
        self._history[slot] = 0
        self._seed[slot] = params.seed or 0
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self._known[slot] = setup.token_ids
        self._progress.set_slot(setup)
        self._window_ring[slot] = self._group_ring[slot] = -1

    def _change_table(self, plan: StepPlan) -> None:
        slots, columns, blocks = plan.table_slots, plan.table_columns, plan.table_blocks
        assert (slots > 0).all(), "the table row of the padding slot is written"
        self._owner[self._table[slots, columns]] = 0
        self._table[slots, columns] = blocks
        given = blocks > 0
        assert not self._owner[blocks[given]].any(), "a block is given to a slot while another one's table names it"
        self._owner[blocks[given]] = slots[given]
        assert (self._table[slots, columns] == blocks).all(), "a table entry is changed twice in one plan"
        assert (self._owner[blocks[given]] == slots[given]).all(), "a block is given to two slots in one plan"

    def _resolve(self, plan: StepPlan) -> StepPlan:
        """The plan as it runs, with a random number of drafts to check in each decode row."""
        is_decode, occupant = ~plan.is_prefill, self._occupant[plan.slots]
        assert (occupant > 0).all(), "a row names a slot without an occupant"
        most = np.where(is_decode, 1 + self._num_drafts, self._max_model_len)
        assert ((plan.counts >= 1) & (plan.counts <= most)).all(), "a row has a wrong number of tokens"
        if plan.is_plain:
            assert (plan.counts == 1).all() and is_decode.all(), "a plain step has drafts or a prompt"
            assert not plan.setups, "a plain step has a new request, of which drafting would not hear"
        if plan.is_plain or not self._num_drafts:
            return plan
        starts = plan.starts[is_decode]
        assert (starts <= self._num_computed[plan.slots[is_decode]]).all(), "a row is planned past where it can begin"
        room = self._progress.room(plan)
        drafts = np.where(room < 0, room, self._random.integers(0, np.maximum(room, 0) + 1))
        return self._progress.resolve(plan, drafts.astype(np.int32))

    def _use_rings(self, plan: StepPlan) -> None:
        """What a row reads before its start is still there, whatever was written for drafts; then it writes."""
        for slot, start, count in zip(*(part.tolist() for part in (plan.slots, plan.starts, plan.counts)), strict=True):
            if slot == 0:
                continue
            for ring, reach in ((self._window_ring, self._model.window), (self._group_ring, self._model.lookback)):
                length = ring.shape[1]
                read = np.arange(max(0, start - reach), start)
                assert (ring[slot, read % length] == read).all(), f"slot {slot} lost positions before {start}"
                written = np.arange(max(start, start + count - length), start + count)
                ring[slot, written % length] = written

    def _draw(self, plan: StepPlan) -> tuple[Int32, Int32]:
        """Tokens of the sampling rows, row after row, and how many each keeps: one, and a random number of drafts."""
        slots = plan.slots[plan.samples]
        drafts = np.where(plan.is_prefill, 0, plan.counts - 1)[plan.samples]
        num_tokens = np.where(slots > 0, 1 + self._random.integers(0, drafts + 1), 0).astype(np.int32)
        tokens = np.zeros((len(slots), int(num_tokens.max(initial=1))), dtype=np.int32)
        for place in range(tokens.shape[1]):
            rows = np.flatnonzero(num_tokens > place)
            own = slots[rows]
            if place:
                self._history[own] = (
                    self._history[own] * _FACTOR + tokens[rows, place - 1].astype(np.uint64) + np.uint64(1)
                )
            tokens[rows, place] = self._model.draw(self._history[own], self._seed[own])
            self._token[own] = tokens[rows, place]
            num_tokens[rows[~self._is_finite(tokens[rows, place])]] = place + 1  # such a line ends its row
        firsts = plan.starts + np.where(plan.is_prefill, plan.counts, 1)
        self._num_computed[slots] = self._progress.starts[slots] = firsts[plan.samples] + num_tokens - 1
        return tokens[np.arange(tokens.shape[1]) < num_tokens[:, None]], num_tokens

    def _check_rows(self, plan: StepPlan) -> None:
        slots, starts, is_prefill = plan.slots, plan.starts, plan.is_prefill
        assert len(slots), "a plan has no rows"
        is_real = slots > 0  # the others were planned past the limit of their request
        assert len(np.unique(slots[is_real])) == is_real.sum(), "two rows of one plan share a slot"
        continues = starts == self._num_computed[slots] * is_real
        assert continues.all(), f"rows do not continue their slots: {slots}, {starts}"
        is_prefilling = (self._token[slots] < 0) & is_real
        assert (is_prefilling == is_prefill).all(), "prefill after the first sample, or decode before it"
        assert (np.diff(is_prefill.astype(np.int8)) >= 0).all(), "a decode row comes after a prefill row"
        assert (starts + plan.counts <= self._max_model_len).all(), "a row goes past the longest sequence"
        assert len(plan.host_tokens) == plan.counts[is_prefill].sum(), "host tokens and prefill rows differ"
        is_first = starts == 0
        self._decoder_start[slots[is_first]] = plan.decoder_starts[is_first]
        assert (self._decoder_start[slots] == plan.decoder_starts)[is_real].all(), "the decoder start moved"

    def _check_blocks(self, plan: StepPlan) -> None:
        """Positions to be read were written by the same occupant, those to be written have a block."""
        starts = plan.starts[:, None]
        last = (starts + plan.counts[:, None] - 1) // self._block_tokens
        columns = np.arange(int(last.max()) + 1)
        blocks = self._table[plan.slots, : len(columns)]  # [rows, columns]
        occupants = np.broadcast_to(self._occupant[plan.slots, None], blocks.shape)
        is_read = columns * self._block_tokens < starts
        is_written = (columns >= starts // self._block_tokens) & (columns <= last)
        is_read &= plan.slots[:, None] > 0
        is_written &= plan.slots[:, None] > 0
        assert blocks[is_read | is_written].all(), "a position lies in the padding block"
        assert (self._writer[blocks] == occupants)[is_read].all(), "a row reads a block that another request wrote"
        self._writer[blocks[is_written]] = occupants[is_written]

    def _compute(self, plan: StepPlan) -> None:
        """Advance the histories to each row's first draw: decode rows all at once, prefill rows one by one."""
        decoding = plan.slots[~plan.is_prefill & (plan.slots > 0)]
        tokens = self._token[decoding].astype(np.uint64)
        self._history[decoding] = self._history[decoding] * _FACTOR + tokens + np.uint64(1)
        end = 0
        for row in np.flatnonzero(plan.is_prefill).tolist():
            start, end, slot = end, end + int(plan.counts[row]), plan.slots[row]
            chunk = plan.host_tokens[start:end]
            assert ((chunk >= 0) & (chunk < self._model.vocab_size)).all(), "a prefill token is out of range"
            known = self._known[slot][plan.starts[row] :][: len(chunk)]
            assert np.array_equal(chunk, known), "a slot's setup and its prefill have different tokens"
            self._history[slot] = self._model.history(chunk, self._history[slot, None])[0]
        self._num_computed[plan.slots[plan.is_prefill]] += plan.counts[plan.is_prefill]

    def _is_finite(self, tokens: Int32) -> Bool:
        broken = -1 if self._model.broken_token is None else self._model.broken_token
        is_finite: Bool = tokens != broken
        return is_finite

    def _prompt_logprobs(self, plan: StepPlan) -> Logprobs | None:
        for row, count in zip(plan.logprob_rows.tolist(), plan.logprob_counts.tolist(), strict=True):
            assert plan.is_prefill[row] and 0 < count <= plan.counts[row], "a row scores tokens that it does not have"
        wanted = self._num_prompt_logprobs[plan.slots[plan.logprob_rows]]
        assert (wanted >= 0).all(), "a row scores tokens that nobody asked for"
        return self._logprobs(wanted, plan.logprob_targets)

    def _logprobs(self, wanted: Int32, tokens: Int32) -> Logprobs | None:
        num_top = int(wanted.max(initial=-1))
        if num_top < 0:
            return None
        top = (tokens[:, None] + np.arange(num_top, dtype=np.int32)) % self._model.vocab_size
        values = -top.astype(np.float32)
        return Logprobs(-tokens.astype(np.float32), np.ones(len(tokens), dtype=np.int32), top.astype(np.int32), values)

    def _logits(self, plan: StepPlan) -> dict[int, Float32]:
        logits: dict[int, Float32] = {}
        for row in np.flatnonzero(plan.wants_logits).tolist():
            positions = plan.starts[row] + np.arange(plan.counts[row], dtype=np.float32)[:, None]
            logits[row] = np.broadcast_to(positions.astype(np.float32), (len(positions), self._model.vocab_size))
        return logits
