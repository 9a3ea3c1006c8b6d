"""Attention of a block of drafts: every place sees the whole block and the window before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference import quant
from deepinfer.ops.reference.build import reference_ops
from deepinfer.ops.reference.rope import rope_frequencies, rotate, rotation
from deepinfer.ops.table import Ops, build
from deepinfer.ops.weights import AttentionWeights, NormWeights, RopeSpec, Weight
from ops import world

HEADS, DIM, ROPE = 4, 64, 32


def attention(window: int) -> AttentionWeights:
    random = torch.Generator().manual_seed(window)

    def matrix(rows: int, columns: int) -> Weight:
        return Weight((torch.randn(rows, columns, generator=random) * columns**-0.5).bfloat16())

    def norm(width: int) -> NormWeights:
        return NormWeights(Weight((1 + 0.1 * torch.randn(width, generator=random)).bfloat16()), 1e-6)

    return AttentionWeights(
        matrix(32, 96), norm(32), matrix(HEADS * DIM, 32), matrix(DIM, 96), norm(DIM),
        Weight(torch.randn(HEADS, generator=random)), matrix(32, HEADS * DIM), matrix(96, 32), HEADS, 1, window,
        RopeSpec(ROPE, 10000.0),
    )  # fmt: skip


def expected(
    q: Tensor, rows: Tensor, batch: TokenBatch, history: dict[int, Tensor], weights: AttentionWeights
) -> Tensor:
    """By the formula, one place after the other; history: window rows of every position by slot."""
    results, own = [], quant.unpack_window(rows)
    sink, turns = weights.sink.value, rope_frequencies(weights.rope, q.device)
    for row, slot in enumerate(batch.row_slots.tolist()):
        begin, end = batch.row_offsets[row : row + 2].tolist()
        start = int(batch.row_starts[row])
        first = max(0, start - weights.window, int(batch.window_starts[row]))
        keys = torch.cat([quant.unpack_window(history[slot][first:start]), own[begin:end]])
        for place in range(begin, end):
            scores = torch.einsum("hd,kd->hk", q[place], keys) * DIM**-0.5
            shares = torch.cat([scores, sink[:, None]], dim=1).softmax(-1)[:, :-1]
            turn = rotation(batch.positions[place : place + 1], turns)
            results.append(rotate((shares @ keys)[None], turn, backwards=True)[0])
    return torch.stack(results)


def tables() -> list[Ops]:
    from backends.cpu import pair  # compiles

    return [build({"reference": reference_ops("fast")}), build({"reference": reference_ops("float32")}), pair.cpu()]


@pytest.mark.parametrize("number", range(3), ids=["reference", "float32", "cpu"])
@pytest.mark.parametrize(
    ("window", "spare", "rows", "window_starts"),
    [
        (16, 5, [(1, 40, 5)], None),
        (16, 3, [(1, 40, 3), (2, 9, 3), (3, 1, 3)], None),
        (8, 4, [(2, 21, 4), (1, 100, 4), (3, 0, 4)], [15, 99, 0]),
        (128, 5, [(slot, 20 * slot, 5) for slot in (1, 2, 3, 4)], None),
        (16, 1, [(1, 33, 1), (2, 60, 1)], None),
        (64, 40, [(1, 90, 40)], None),  # more places than a tile of tokens
    ],
)
def test_blocks_equal_the_formula(number: int, window: int, spare: int, rows, window_starts) -> None:
    ops, weights, random = tables()[number], attention(window), torch.Generator().manual_seed(5)
    batch = world.make_batch(rows, window_starts=window_starts, is_block=True)
    history = {slot: quant.pack_window(torch.randn(160, DIM, generator=random)) for slot, _, _ in rows}
    ring = world.poisoned(6, window + spare, DIM // 32 * 33)
    for slot, start, _ in rows:
        for position in range(max(0, start - window - spare), start):
            ring[slot, position % (window + spare)] = history[slot][position]
    q = torch.randn(batch.num_tokens, HEADS, DIM, generator=random)
    own = quant.pack_window(torch.randn(batch.num_tokens, DIM, generator=random))
    result = ops.attend(q, own, batch, ring, None, None, ops.prepare_attention(weights))
    limit = 1e-2 if number == 2 else 1e-5  # on a CPU queries and shares may be rounded to bf16
    assert golden_error(result, expected(q, own, batch, history, weights)) < limit


def golden_error(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


@pytest.mark.parametrize("number", range(3), ids=["reference", "float32", "cpu"])
def test_main_rows_are_the_window_rows_of_the_whole_path(number: int) -> None:
    ops = tables()[number]
    prepared = ops.prepare_attention(attention(16))
    x = torch.randn(300, 96, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(7, 307, dtype=torch.int32)
    assert torch.equal(ops.main_rows(x, positions, prepared), ops.attention_inputs(x, positions, prepared)[2])
    assert ops.main_rows(x[:0], positions[:0], prepared).shape == (0, DIM // 32 * 33)
