"""Floors of one rank at the released sizes."""

from pathlib import Path

import pytest

from deepinfer.model.v41.config import ModelConfig
from deepinfer.rank.floor import BF16_PER_S, BYTES_PER_S, Work, floors

CONFIG = ModelConfig.from_file(Path(__file__).parents[1] / "config-flash.json")


def decode(num_requests: int) -> Work:
    tokens = 4 * num_requests
    return Work(num_requests, tokens, tokens, tokens, end=131_072)


def test_the_head_is_bound_by_its_bytes_until_its_products_take_longer():
    size = CONFIG.vocab_size * CONFIG.hidden_size
    assert floors(CONFIG, decode(8), 64)["head"] == pytest.approx(2 * size / BYTES_PER_S)
    assert floors(CONFIG, decode(256), 64)["head"] == pytest.approx(2 * 1024 * size / BF16_PER_S)


def test_sums_of_a_step_at_the_released_sizes():
    assert 1e3 * sum(floors(CONFIG, decode(8), 64).values()) == pytest.approx(3.3, abs=0.05)
    assert 1e3 * sum(floors(CONFIG, decode(256), 64).values()) == pytest.approx(31.7, abs=0.05)


def test_more_ranks_hold_fewer_experts_each_and_bounded_replay_leaves_the_decoder_half_little():
    assert floors(CONFIG, decode(8), 8)["experts"] > 4 * floors(CONFIG, decode(8), 64)["experts"]
    whole, bounded = (Work(1, 4096, tokens, 1, 4096) for tokens in (4096, 140))
    assert floors(CONFIG, bounded, 64)["attend"] < 0.7 * floors(CONFIG, whole, 64)["attend"]


def test_entries_that_a_token_sees_grow_up_to_the_most():
    assert Work(1, 8, 8, 8, end=8).entries(8, 2, 512) == pytest.approx((0 + 1 + 1 + 2 + 2 + 3 + 3 + 4) / 8)
    assert decode(1).entries(4, 2, 512) == 512
