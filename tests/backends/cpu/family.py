"""What every native op that works row by row must hold, whatever it computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.cpu import pair
from deepinfer.backends.cpu.library import native
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.values import Mix
from model_configs import GOLDEN, NANO, config
from ops import golden

MODELS = ("golden", "nano")
BATCHES = (0, 1, 2, 7, 32, 33, 64)


@functools.cache
def weights(model: str) -> ModelWeights:
    folder = {"golden": GOLDEN, "nano": NANO}[model]
    return ModelWeights(Checkpoint(folder), config(model), folder)


@dataclass(frozen=True)
class Case:
    """An op of one model: its prepared weights in both tables, and arguments for a number of tokens.

    arguments: tokens -> what comes before the prepared weights; tensors have a line per token, all
    None otherwise.
    """

    op: str
    prepared: Callable[[], tuple[Any, Any]]  # reference, cpu; None for an op without
    arguments: Callable[[int], Sequence[Any]]

    def reference(self, arguments: Sequence[Any]) -> list[Tensor]:
        return self._run(pair.reference(), arguments, self.prepared()[0])

    def cpu(self, arguments: Sequence[Any]) -> list[Tensor]:
        return self._run(pair.cpu(), arguments, self.prepared()[1])

    def _run(self, table, arguments, prepared) -> list[Tensor]:
        return flat(getattr(table, self.op)(*arguments, *([] if prepared is None else [prepared])))


def case(op: str, prepare: str, given: Sequence[Any], arguments: Callable[[int], Sequence[Any]]) -> Case:
    """given: what the prepare op takes."""

    @functools.cache
    def prepared(tile_parts: int) -> tuple[Any, ...]:
        return tuple(getattr(table, prepare)(*given) for table in (pair.reference(), pair.cpu()))

    return Case(op, lambda: prepared(native().tile_parts()), arguments)


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Mix):
        return [result.pre, result.post, result.comb]
    return [part for item in result for part in flat(item)] if isinstance(result, tuple) else [result]


def rows(arguments: Sequence[Any], start: int, end: int) -> list[Any]:
    """The arguments of tokens start .. end - 1."""

    def cut(value: Any) -> Any:
        if isinstance(value, Mix):
            return Mix(value.pre[start:end], value.post[start:end], value.comb[start:end])
        return value[start:end] if isinstance(value, Tensor) else value

    return [cut(value) for value in arguments]


def check_against_reference(case: Case, limit: float) -> None:
    """Every output within `limit` of the reference, relative to the norm of its row; whole numbers are equal."""
    for count in BATCHES:
        arguments = case.arguments(count)
        for actual, expected in zip(case.cpu(arguments), case.reference(arguments), strict=True):
            assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
            if actual.is_floating_point():
                assert golden.row_error(actual.flatten(1), expected.flatten(1)) <= limit
            else:
                assert torch.equal(actual, expected)


def check_bits(case: Case) -> None:
    """The same bits alone, among others and with two threads."""
    arguments = case.arguments(max(BATCHES))
    alone = [case.cpu(rows(arguments, token, token + 1)) for token in range(max(BATCHES))]
    expected = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for threads in (1, 2):
        with pair.threads(threads):
            for count in BATCHES:
                for actual, whole in zip(case.cpu(rows(arguments, 0, count)), expected, strict=True):
                    assert torch.equal(actual, whole[:count]), (threads, count)


def check_strides(case: Case) -> None:
    """The same bits from tensors whose numbers do not lie side by side."""
    arguments = case.arguments(7)
    apart = [pair.spread(value) if isinstance(value, Tensor) else value for value in arguments]
    for actual, expected in zip(case.cpu(apart), case.cpu(arguments), strict=True):
        assert torch.equal(actual, expected)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
