"""Where each token of a step stands: the one description that every cache-touching op reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one pass through some layers, row after row.

    A row is one request's stretch of consecutive tokens. Keys and values of earlier positions lie
    in the row's slot (rings) and blocks (pages); those of the stretch itself are computed in the
    step and handed to the ops directly, since a ring need not hold a whole prompt chunk.

    The decoder half gets a batch of its own with fewer tokens; a row may then be empty.

    positions: [tokens] int32, position in the request's sequence.
    rows: [tokens] int32, the token's row.
    row_offsets: [rows + 1] int32; row r owns tokens row_offsets[r] .. row_offsets[r + 1] - 1.
    row_starts: [rows] int32, position of the row's first token.
    row_slots: [rows] int32; 0 is the padding slot, which is never written.
    block_table: [rows, columns] int32; entry c holds positions c * block_tokens onwards; 0 is the
        padding block, which is never written.
    window_starts: [rows] int32, the first position that has a window vector in these layers
        (0, or where a bounded replay began).
    block_tokens: tokens per block.
    max_position: host-side bound, the largest position in the batch, -1 when it is empty.
    is_block: each row is a block of drafts. Its tokens see the whole row and the last window positions
        before its start; their own window vectors are not kept.
    derived: what ops worked out from the fields above, see `once` and `latest`.
    """

    positions: Tensor
    rows: Tensor
    row_offsets: Tensor
    row_starts: Tensor
    row_slots: Tensor
    block_table: Tensor
    window_starts: Tensor
    block_tokens: int
    max_position: int
    is_block: bool = False
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gave the first time that an op asked for `key`: layers share such a value.

        It may rest on this batch and on what the key names, and nobody changes it.
        """
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def latest(self, name: Hashable, of: object, key: Hashable, make: Callable[[], T]) -> T:
        """`once` for what also rests on `of`: it and what `make` gave last are kept until `name` is asked for with
        another `of` or `key`."""
        found = self.derived.get(name)
        if found is None or found[0] is not of or found[1] != key:
            found = self.derived[name] = (of, key, make())
        made: T = found[2]
        return made


@dataclass(frozen=True)
class ForwardBatch:
    """Everything that one forward pass of a model reads, caches apart.

    The encoder half computes all tokens; the decoder half (from the boundary layer's attention
    on) only those whose position reached their request's decoder start. It has a batch of its own
    where its tokens differ or its windows begin later; otherwise `decoder` is `encoder`.

    tokens: [tokens] int64.
    is_image: [tokens] bool, or None when all are text.
    decoder_tokens: [decoder tokens] int64, indices into tokens; None = all of them.
    logit_tokens: [n] int64, indices into the decoder's tokens whose logits are wanted; None = all in order.
    feeds_draft: the decoder's tokens leave what the draft head reads of them.
    image_rows: [image tokens, hidden] float32, what stands at the image tokens in place of their embedding.
    logits: [lines, vocab] float32, the memory for those of the pass; None = new one.
    """

    tokens: Tensor
    is_image: Tensor | None
    encoder: TokenBatch
    decoder: TokenBatch
    decoder_tokens: Tensor | None
    logit_tokens: Tensor | None
    feeds_draft: bool = False
    image_rows: Tensor | None = None
    logits: Tensor | None = None


class Hidden(NamedTuple):
    """What the head reads of each token after all layers; a few logits at a time can be made of it."""

    streams: Tensor  # [tokens, streams, hidden]
    pre: Tensor  # [tokens, streams] float32, weights of the last mix

    def part(self, start: int, end: int) -> Hidden:
        """Tokens start .. end - 1."""
        return Hidden(self.streams[start:end], self.pre[start:end])


class Computed(NamedTuple):
    """What a step has on the device before its tokens are drawn.

    hidden: first of the step's lines, then of the prompt tokens that are scored; None when there are none of these.
    logits: [lines, vocab] float32. best: what `best_tokens` gives for them.
    rows: of a step that was captured, as far as `verify` reads of them; rows of nothing come last.
    """

    hidden: Hidden | None
    logits: Tensor
    best: tuple[Tensor, Tensor]
    rows: TokenBatch | None = None
