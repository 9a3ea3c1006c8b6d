"""draw: noise keyed by (seed, position, id), exact ties, greedy, masks, extreme temperatures."""

from __future__ import annotations

import math

import pytest
import torch

from deepinfer.errors import ShapeError
from deepinfer.ops.reference import sample
from ops import golden


def draw(logits: torch.Tensor, temperature, seeds, positions) -> list[int]:
    count = len(logits)

    def filled(values, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).expand(count).contiguous()

    temperatures = filled(temperature, torch.float32)
    tokens = golden.ops("fast").draw(logits, temperatures, filled(seeds, torch.int64), filled(positions, torch.int64))
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def splitmix(x: int) -> int:
    """The finaliser with Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_uniform_numbers_follow_the_published_generator():
    gamma = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (1, 5), (2**63 - 1, 8191), (123456789, 2**40)):
        key = splitmix((splitmix((seed + gamma) % 2**64) + position * gamma) % 2**64)
        expected = [((splitmix((key + (id_ + 1) * gamma) % 2**64) >> 12) + 0.5) * 2.0**-52 for id_ in range(50)]
        assert sample.uniform(torch.tensor([seed]), torch.tensor([position]), 50)[0].tolist() == expected


def test_known_bits_never_change():
    """A seed must mean the same text in every later version."""
    values = sample.uniform(torch.tensor([42]), torch.tensor([7]), 3)[0].tolist()
    assert values == [0.44255783193913845, 0.9431295206956448, 0.6310867121464058]


def test_the_extremes_of_the_uniform_numbers_give_finite_noise():
    ends = torch.tensor([0.5 * 2.0**-52, (2**52 - 0.5) * 2.0**-52], dtype=torch.float64)
    assert ends[0] > 0
    assert ends[1] < 1
    assert (-(-ends.log()).log()).isfinite().all()


def test_a_draw_depends_on_seed_and_position_only():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).expand(40, -1)
    seeds, positions = torch.arange(40) // 8, torch.arange(40) % 8
    together = draw(logits, 1.0, seeds, positions)
    for row in range(40):
        assert draw(logits[:1], 1.0, seeds[row : row + 1], positions[row : row + 1]) == [together[row]]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert draw(logits, 1.0, seeds[order], positions[order]) == [together[i] for i in order.tolist()]
    assert draw(logits, 1.0, seeds, positions) == together
    assert len(set(together)) > 20


def test_seeds_and_positions_are_not_interchangeable():
    noise = sample.gumbel_noise(torch.tensor([1, 2, 3]), torch.tensor([2, 1, 0]), 64)
    assert len({tuple(row) for row in noise.tolist()}) == 3
    assert noise.flatten().unique().numel() == 3 * 64


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    """Chi-square over 20,000 draws: 7 degrees of freedom, 24.3 is the 0.1 % point."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.5, 1.5, 0.2])
    count = 20_000
    positions = torch.arange(count) % 200
    seeds = torch.arange(count) // 200
    tokens = torch.tensor(draw(logits.expand(count, -1), temperature, seeds, positions))
    expected = (logits.double() / temperature).softmax(-1) * count
    observed = torch.bincount(tokens, minlength=8).double()
    assert float(((observed - expected).square() / expected).sum()) < 24.3


def test_noise_has_the_moments_of_a_gumbel():
    noise = sample.gumbel_noise(torch.arange(200), torch.full((200,), 11), 1000)
    assert abs(float(noise.mean()) - 0.5772156649) < 0.01  # 200,000 values: standard error 0.003
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    columns = torch.corrcoef(noise[:, :20].T) - torch.eye(20)
    assert columns.abs().max() < 0.3  # 200 values each: standard error 0.07


def test_temperature_zero_is_the_first_of_the_largest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -0.0, 0.0], [-math.inf, -5.0, -5.0, -9.0]])
    assert draw(logits, 0.0, 3, 4) == [1, 0, 1]
    wide = torch.full((2, 5000), 0.25)
    wide[1, 3000:] = 0.5
    assert draw(wide, 0.0, 0, 0) == [0, 3000]


def test_greedy_and_random_rows_share_a_batch():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    temperatures = torch.tensor([0.0, 1.0, 0.0, 0.7, 1.3, 0.0])
    tokens = draw(logits, temperatures, torch.arange(6), 9)
    for row in range(6):
        assert draw(logits[row : row + 1], temperatures[row : row + 1], row, 9) == [tokens[row]]
    assert [tokens[i] for i in (0, 2, 5)] == logits.argmax(-1)[[0, 2, 5]].tolist()


def test_excluded_ids_are_never_drawn():
    logits = torch.full((500, 40), -math.inf)
    logits[:, [3, 17]] = 0.0
    assert set(draw(logits, 1.0, torch.arange(500), 0)) == {3, 17}
    assert set(draw(logits, 100.0, torch.arange(500), 1)) == {3, 17}
    logits[:, 17] = -math.inf
    assert set(draw(logits, 1e-6, torch.arange(500), 2)) == {3}


def test_extreme_temperatures_stay_finite():
    logits = torch.randn(300, 20, generator=torch.Generator().manual_seed(3)) * 30
    assert draw(logits, 1e-6, torch.arange(300), 5) == logits.argmax(-1).tolist()
    hot = draw(torch.tensor([[0.0, 1.0, 2.0]]).expand(3000, -1), 100.0, torch.arange(3000), 5)
    shares = torch.bincount(torch.tensor(hot), minlength=3) / 3000
    assert (shares - 1 / 3).abs().max() < 0.04
    assert draw(torch.full((1, 9), 3e38), 1e-6, 0, 0)[0] in range(9)


def test_rows_without_a_finite_logit_give_a_valid_id():
    logits = torch.tensor([[math.nan, 1.0, 2.0], [-math.inf] * 3, [math.inf, 0.0, math.inf]])
    for temperature in (0.0, 1.0):
        tokens = draw(logits, temperature, 1, 1)
        assert all(0 <= token < 3 for token in tokens)
    assert draw(logits[2:], 1.0, 1, 1) == [0]


def test_tiles_of_rows_change_nothing(monkeypatch):
    logits = torch.randn(30, 64, generator=torch.Generator().manual_seed(4))
    whole = draw(logits, 0.9, torch.arange(30), 2)
    monkeypatch.setattr(sample, "TILE_BYTES", 4 * 8 * 64)
    assert draw(logits, 0.9, torch.arange(30), 2) == whole


def test_logits_are_left_alone_and_no_rows_give_no_tokens():
    logits = torch.randn(3, 10)
    before = logits.clone()
    draw(logits, 0.5, 0, 0)
    assert torch.equal(logits, before)
    assert draw(torch.empty(0, 10), 1.0, 0, 0) == []
    with pytest.raises(ShapeError, match="seeds has shape"):
        golden.ops("fast").draw(logits, torch.ones(3), torch.ones(2), torch.ones(3))
