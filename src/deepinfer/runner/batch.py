"""StepPlan -> the tensors of one forward pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.messages import Int32, StepPlan
from deepinfer.ops.batch import ForwardBatch, TokenBatch
from deepinfer.ops.table import Ops
from deepinfer.ops.transfer import to_device


class BatchBuilder:
    """Turns plans into batches; keeps the device's copy of the block table.

    The table holds one line per slot and is changed by the few entries that a plan brings, so a
    step never copies a whole table from the host.
    """

    def __init__(self, ops: Ops, num_slots: int, max_columns: int, block_tokens: int, token_ring: Tensor, window: int):
        self._ops = ops
        self.device = token_ring.device
        self.block_tokens, self.max_columns = block_tokens, max_columns
        self.block_table = torch.zeros(num_slots + 1, max_columns, dtype=torch.int32, device=self.device)
        self.token_ring = token_ring  # [slots, length] int32
        self.window = window  # positions that a token sees in its window
        self.count = np.arange(num_slots + 2, dtype=np.int32)
        self._zeros = np.zeros(num_slots + 1, dtype=np.int32)

    def build(self, plan: StepPlan, *, feeds_draft: bool = False) -> ForwardBatch:
        """The forward pass of `plan`, after its block-table changes. feeds_draft: see `ForwardBatch`."""
        self.apply_changes(plan)
        is_single = plan.is_plain or bool((plan.counts == 1).all())  # nothing but newest tokens
        offsets, rows, positions = self._places(plan, is_single)
        encoder = self._token_batch(plan, rows, positions, offsets, plan.starts, self._zeros[: plan.num_rows])
        tokens = self._tokens(plan, rows, positions, is_single)
        decoder, kept = encoder, None
        if plan.decoder_starts.any():
            decoder, kept = self._decoder(plan, encoder, rows, positions, offsets)
        logit_tokens = None if plan.is_plain else self._logit_tokens(plan, kept, offsets)
        decoder_tokens = None if kept is None else self.int64(kept)
        return ForwardBatch(tokens, None, encoder, decoder, decoder_tokens, logit_tokens, feeds_draft)

    def block(self, slots: Int32, starts: Int32, window_starts: Int32, num_places: int) -> TokenBatch:
        """A block of drafts for each of these slots [n]: places at positions starts, starts + 1, ..."""
        count = np.arange(len(slots) + 1, dtype=np.int32)
        positions = np.repeat(starts, num_places) + np.tile(np.arange(num_places, dtype=np.int32), len(slots))
        return TokenBatch(
            positions=self._int32(positions),
            rows=self._int32(np.repeat(count[:-1], num_places)),
            row_offsets=self._int32(count * num_places),
            row_starts=self._int32(starts),
            row_slots=self._int32(slots),
            block_table=self.block_table[:1, :1].expand(len(slots), 1),
            window_starts=self._int32(window_starts),
            block_tokens=self.block_tokens,
            max_position=int(positions.max()),
            is_block=True,
        )

    def store(self, token_ids: Tensor, slots: Int32, positions: Int32) -> None:
        """Leave new tokens [n] int64 where the next step looks for them."""
        self._ops.write_tokens(token_ids, self.token_ring, slots, positions)

    def store_ahead(self, token_ids: Tensor, batch: TokenBatch) -> None:
        """Leave drafts [rows, places] int64 of a block's rows there: each behind the place that it was drawn at."""
        ahead = replace(batch, positions=batch.positions + 1, row_starts=batch.row_starts + 1)
        self._ops.store_tokens(token_ids.flatten(), ahead, self.token_ring)

    def verify(self, token_ids: Tensor, is_usable: Tensor, rows: TokenBatch, newest: Tensor) -> None:
        """Newest tokens, which are stored too, and their positions [2, rows] int32, see `Ops.verify`."""
        self._ops.verify(token_ids, is_usable, rows, self.token_ring, newest)

    def _decoder(
        self,
        plan: StepPlan,
        encoder: TokenBatch,
        rows: NDArray[np.integer],
        positions: NDArray[np.integer],
        offsets: NDArray[np.integer],
    ) -> tuple[TokenBatch, NDArray[np.int64] | None]:
        """The decoder half's batch, and which of the step's tokens are in it, ascending; None = all."""
        decoder_starts = plan.decoder_starts[rows]
        is_decoder = positions >= decoder_starts
        if is_decoder.all():
            if not ((decoder_starts > 0) & (positions - decoder_starts < self.window - 1)).any():
                return encoder, None
            return self._token_batch(plan, rows, positions, offsets, plan.starts, plan.decoder_starts), None
        kept = np.flatnonzero(is_decoder)
        counts = np.bincount(rows[kept], minlength=plan.num_rows)
        kept_offsets = np.concatenate([[0], np.cumsum(counts)])
        starts = np.maximum(plan.starts, plan.decoder_starts)
        decoder = self._token_batch(plan, rows[kept], positions[kept], kept_offsets, starts, plan.decoder_starts)
        return decoder, kept

    def _logit_tokens(
        self, plan: StepPlan, kept: NDArray[np.int64] | None, offsets: NDArray[np.integer]
    ) -> Tensor | None:
        """The decoder's tokens whose logits are wanted; None = all of them in order."""
        wants_all = kept is None and (plan.samples & (~plan.is_prefill | (plan.counts == 1))).all()
        if wants_all and not plan.wants_logits.any() and not len(plan.logprob_rows):
            return None
        places = logit_positions(plan, offsets)
        return self.int64(places if kept is None else np.searchsorted(kept, places))

    def _places(
        self, plan: StepPlan, is_single: bool
    ) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
        """Offset of each row and the end, row of each token, position of each token."""
        if is_single:
            return self.count[: plan.num_rows + 1], self.count[: plan.num_rows], plan.starts
        offsets = np.concatenate([[0], np.cumsum(plan.counts)])
        rows = np.repeat(np.arange(plan.num_rows), plan.counts)
        return offsets, rows, np.arange(offsets[-1]) - offsets[rows] + plan.starts[rows]

    def apply_changes(self, plan: StepPlan) -> None:
        """Write the block-table entries that a plan brings."""
        if len(plan.table_slots):
            changes = self.int64(np.stack((plan.table_slots, plan.table_columns, plan.table_blocks)))
            slots, columns, blocks = changes.unbind()
            self.block_table[slots, columns] = blocks.int()

    def _tokens(
        self, plan: StepPlan, rows: NDArray[np.integer], positions: NDArray[np.integer], is_single: bool
    ) -> Tensor:
        """[tokens] int64: the host's for prefill rows, otherwise what the slot's ring holds."""
        slots = plan.slots if is_single else plan.slots[rows]
        tokens = self._ops.read_tokens(self.token_ring, slots, positions.astype(np.int32, copy=False))
        if len(plan.host_tokens):
            tokens[self.int64(np.flatnonzero(plan.is_prefill[rows]))] = self.int64(plan.host_tokens)
        return tokens

    def _token_batch(
        self,
        plan: StepPlan,
        rows: NDArray[np.integer],
        positions: NDArray[np.integer],
        offsets: NDArray[np.integer],
        starts: NDArray[np.int32],
        window_starts: NDArray[np.int32],
    ) -> TokenBatch:
        max_position = int(positions.max(initial=-1))
        columns, row_starts = max_position // self.block_tokens + 1, self._int32(starts)
        return TokenBatch(
            positions=row_starts if positions is starts else self._int32(positions),
            rows=self._int32(rows),
            row_offsets=self._int32(offsets),
            row_starts=row_starts,
            row_slots=self._int32(plan.slots),
            block_table=self._ops.read_table(self.block_table, plan.slots, columns),
            window_starts=self._int32(window_starts),
            block_tokens=self.block_tokens,
            max_position=max_position,
        )

    def _int32(self, values: NDArray[np.integer]) -> Tensor:
        return self.on_device(values.astype(np.int32, copy=False))

    def int64(self, values: NDArray[np.integer]) -> Tensor:
        """Numbers of the host as int64 on the device, which is not waited for."""
        return self.on_device(values.astype(np.int64, copy=False))

    def on_device(self, values: NDArray[Any]) -> Tensor:
        """See `to_device`."""
        return to_device(values, self.device)


def logit_positions(plan: StepPlan, offsets: NDArray[np.integer]) -> NDArray[np.int64]:
    """Indices of the step's tokens whose logits are wanted.

    First those of the step's `Lines`: the last one of a sampling prefill row, all of a decode row; then all
    tokens of the rows that want logits; then the tokens that score prompt tokens; each in row order.
    """
    last = offsets[1:] - 1
    firsts = np.where(plan.is_prefill, last, offsets[:-1])[plan.samples]
    if (firsts == last[plan.samples]).all():
        drawn = firsts
    else:
        counts = last[plan.samples] - firsts + 1
        drawn = np.arange(counts.sum()) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    whole = [np.arange(offsets[row], offsets[row + 1]) for row in np.flatnonzero(plan.wants_logits)]
    starts = offsets[plan.logprob_rows]
    scored = [np.arange(start, start + count) for start, count in zip(starts, plan.logprob_counts, strict=True)]
    return np.concatenate([drawn, *whole, *scored]).astype(np.int64)
