"""The passes of a draft head over rows that the host describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from deepinfer.messages import Int32
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.values import DrawKeys
from deepinfer.runner.batch import BatchBuilder
from deepinfer.sampling.sampler import PlainDraws

Verify = Callable[[Tensor], None]  # writes newest tokens and starts of rows into [2, rows] int32


class DraftHead(Protocol):
    """A draft head over its caches, of whatever model version."""

    def block(self, tokens: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Newest tokens [n] int64 -> features [n * places, H] and logits [n * places, V] of the drafts after them."""
        ...

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [n, V] and raw confidence [n] of the tokens that follow `previous` [n] int64."""
        ...

    def draft(self, tokens: Tensor, batch: TokenBatch, keys: DrawKeys | None) -> tuple[Tensor, Tensor]:
        """`block` with all `next`: drafts [n, places] int64 drawn from the logits as they are, and for each place the
        raw confidence and the log-probability of the likeliest token [n, 2, places].

        keys: of the draws at the first place; None = the likeliest tokens.
        """
        ...


@dataclass(frozen=True)
class DraftRows:
    """Rows that draft, all [rows]: their slots, the newest token of each and its position, and the first position that
    has a window vector in the draft head's layers."""

    slots: Int32
    newest: Int32
    starts: Int32
    window_starts: Int32

    def __len__(self) -> int:
        return len(self.slots)


class Drafts:
    """A draft head whose passes are launched kernel by kernel.

    num_places: drafts of a row.
    """

    def __init__(self, head: DraftHead, builder: BatchBuilder, num_places: int) -> None:
        self.num_places, self._head, self._builder = num_places, head, builder

    def block(self, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """Features [n * places, H] and logits [n * places, V], see `DraftHead`."""
        return self._head.block(self._builder.int64(rows.newest), self._batch(rows))

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """See `DraftHead`."""
        return self._head.next(logits, x, previous)

    def draft(self, rows: DraftRows, draws: PlainDraws) -> tuple[Tensor, Tensor]:
        """Drafts [n, places] int64, left in the token ring too, and their signs [n, 2, places], see `DraftHead`."""
        keys, batch, send = None, self._batch(rows), self._builder.on_device
        if draws.temperature.any():
            keys = DrawKeys(send(draws.temperature), send(draws.seeds), self._builder.int64(rows.starts + 1))
        tokens, signs = self._head.draft(self._builder.int64(rows.newest), batch, keys)
        self._builder.store_ahead(tokens, batch)
        return tokens, signs

    def follow(self, rows: DraftRows, draws: PlainDraws, verify: Verify) -> tuple[Tensor, Tensor] | None:
        """`draft` for rows whose newest tokens and starts are still unknown: `verify` queues what finds them. None:
        nothing was queued, they have to be told."""
        return None

    def store(self, rows: DraftRows, tokens: Tensor) -> None:
        """Leave drafts [n, places] in the token ring, where the next step looks for them."""
        self._builder.store_ahead(tokens, self._batch(rows))

    def _batch(self, rows: DraftRows) -> TokenBatch:
        return self._builder.block(rows.slots, rows.starts, rows.window_starts, self.num_places)


def padding_rows(num_rows: int, position: int) -> DraftRows:
    """Rows of the padding slot, whose drafts are kept nowhere."""
    zeros = np.zeros(num_rows, dtype=np.int32)
    return DraftRows(zeros, zeros, zeros + position, zeros)
