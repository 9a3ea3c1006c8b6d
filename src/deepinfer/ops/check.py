"""Whether each op is batch-invariant: a table of ops that runs every one in parts too and compares bits.

An op that is told of rows runs once for each row alone, an op that sees tokens only for stretches
of 1, 2, 3, ... tokens. Parts get inputs of their own, and copies of the caches where they write. So
the op alone is judged: its inputs in the parts are bit for bit those of the batch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deepinfer.messages import OpCheck
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.clock import GROUP_OF
from deepinfer.ops.table import Ops, one_by_one
from deepinfer.ops.values import Attended, Mix

# Arguments by name; what is not here (prepared weights, a number of columns) is the same for all parts.
OF_TOKENS = {
    "tokens", "is_image", "positions", "streams", "pre", "x", "output", "mix", "low_rank", "q", "window_rows",
    "entries", "candidates", "attended", "chosen", "share", "routed", "rows", "token_ids", "slots", "logits",
    "temperature", "seeds", "taps", "previous",
}  # fmt: skip
PADDED = {"entries", "candidates"}  # [tokens, n] ids, -1 behind the last; a part alone would have fewer columns
WRITTEN = {
    "store_window": ("ring",), "store_tokens": ("ring",), "write_tokens": ("ring",),
    "compress": ("state", "pages", "index_pages"),
}  # fmt: skip
TOKEN_AXIS = {"ngram_rows": 1}  # of the result, where it is not the first
# An image is always encoded alone, and steps that are checked are not captured.
CHECKED = [name for name, group in GROUP_OF.items() if group != "images" and name != "verify"]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """Tokens start .. end - 1 of a call, and the row that they are if the op is told of rows."""

    start: int
    end: int
    row: int | None

    def of(self, name: str, value: Any) -> Any:
        """The part's own copy of an argument."""
        if value is None or name not in OF_TOKENS | {"batch"}:
            return value
        if isinstance(value, TokenBatch):
            return self._of_batch(value)
        if isinstance(value, Mix):
            return Mix(*(self.of(name, item) for item in _fields(value)))
        own = value[self.start : self.end]
        if name in PADDED:
            own = own[:, : int((own >= 0).sum(1).max())]
        return own.copy() if isinstance(own, np.ndarray) else own.clone()

    def _of_batch(self, batch: TokenBatch) -> TokenBatch:
        assert self.row is not None
        row, positions = slice(self.row, self.row + 1), batch.positions[self.start : self.end].clone()
        last = int(positions.max())
        return TokenBatch(
            positions=positions,
            rows=torch.zeros_like(positions),
            row_offsets=batch.row_offsets.new_tensor([0, len(positions)]),
            row_starts=batch.row_starts[row].clone(),
            row_slots=batch.row_slots[row].clone(),
            block_table=batch.block_table[row, : last // batch.block_tokens + 1].clone(),
            window_starts=batch.window_starts[row].clone(),
            block_tokens=batch.block_tokens,
            max_position=last,
            is_block=batch.is_block,
        )


class OpChecker:
    """Collects a verdict for each op that ran with more than one part; does so while `is_on`."""

    def __init__(self, device: torch.device) -> None:
        self.is_on, self._device = True, device
        self._checks: dict[str, OpCheck] = {}

    def around(self, ops: Ops) -> Ops:
        """The same ops, each of them checked, layers as calls of single ops."""
        checked = one_by_one(ops)
        for name in CHECKED:
            setattr(checked, name, self._checked(name, ops.origin[name], getattr(ops, name)))
        checked.checker = self
        return checked

    def checks(self) -> dict[str, OpCheck]:
        """The verdicts so far, by op."""
        return dict(self._checks)

    def _checked(self, name: str, origin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        backend = origin if origin == self._device.type else f"{origin} on {self._device.type}"
        names = list(inspect.signature(getattr(Ops, name)).parameters)[1:]

        def checked(*values: Any) -> Any:
            arguments = dict(zip(names, map(_opened, values), strict=True))
            parts = list(_parts(arguments)) if self.is_on else []
            if len(parts) < 2:
                return function(*values)
            written = WRITTEN.get(name, ())
            copies = {cache: arguments[cache].clone() for cache in written if arguments[cache] is not None}
            alone = [
                function(*(part.of(given, value) for given, value in (arguments | copies).items())) for part in parts
            ]
            result = function(*values)
            if written:
                difference = _first_difference((arguments[cache], copy) for cache, copy in copies.items())
            else:
                difference = _compare_parts(result, alone, parts, TOKEN_AXIS.get(name, 0))
            self._count(name, backend, difference)
            return result

        return checked

    def _count(self, name: str, backend: str, difference: str | None) -> None:
        before = self._checks.get(name) or OpCheck(backend, 0, 0, None)
        self._checks[name] = OpCheck(
            backend,
            before.num_calls + 1,
            before.num_different + (difference is not None),
            before.first_difference or difference,
        )


def _parts(arguments: Arguments) -> Iterator[Part]:
    """Each row that has tokens; without rows, stretches of 1, 2, 3, ... tokens."""
    if "batch" in arguments:
        offsets = arguments["batch"].row_offsets.tolist()
        for row, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
            if start < end:
                yield Part(start, end, row)
        return
    count = len(next(value for name, value in arguments.items() if name in OF_TOKENS))
    start, size = 0, 1
    while start < count:
        yield Part(start, min(start + size, count), None)
        start, size = start + size, size + 1


def _compare_parts(result: Any, alone: list[Any], parts: list[Part], axis: int) -> str | None:
    """The first difference between the parts' results and their share of the batch's."""
    for part, own in zip(parts, alone, strict=True):
        shares = [whole.narrow(axis, part.start, part.end - part.start) for whole in _tensors(result)]
        difference = _first_difference(zip(shares, _tensors(own), strict=True))
        if difference is not None:
            who = f"tokens {part.start} to {part.end - 1}" if part.row is None else f"row {part.row}"
            return f"{who} of {parts[-1].end} tokens, {difference}"
    return None


def _first_difference(pairs: Iterable[tuple[Tensor, Tensor]]) -> str | None:
    """Of (in the batch, alone): where their bits first differ, and the two numbers."""
    for place, (together, alone) in enumerate(pairs):
        if together.shape != alone.shape:  # ids of a selection, with more columns in the batch
            alone = F.pad(alone, (0, together.shape[-1] - alone.shape[-1]), value=-1)
        kind = INTEGERS[together.itemsize]
        differs = together.contiguous().view(kind) != alone.contiguous().view(kind)
        if differs.any():
            index = tuple(differs.nonzero()[0].tolist())
            return f"value {place} at {list(index)}: {together[index].item()!r}, alone {alone[index].item()!r}"
    return None


def _tensors(result: Any) -> list[Tensor]:
    """All tensors of an op's result, in order."""
    if result is None:
        return []
    result = _opened(result)
    if isinstance(result, Tensor):
        return [result]
    items = result if isinstance(result, tuple) else _fields(result)
    return [tensor for item in items for tensor in _tensors(item)]


def _opened(value: Any) -> Any:
    """Attended heads as a tensor, whatever form the backend has for them."""
    return value.heads() if isinstance(value, Attended) else value


def _fields(value: Any) -> list[Any]:
    return [getattr(value, field.name) for field in dataclasses.fields(value)]
