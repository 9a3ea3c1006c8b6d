"""How many blocks an engine gets, and what it refuses to take."""

from __future__ import annotations

import pytest
import torch

from deepinfer.cache.groups import CacheGroup, CacheLayout
from deepinfer.config.engine import CacheOptions
from deepinfer.errors import ConfigError
from deepinfer.runner import memory

CPU = torch.device("cpu")
LAYOUT = CacheLayout((CacheGroup("c", "block", 10, 64, 2), CacheGroup("w", "slot", 100, 5)), 128)
BYTES = LAYOUT.bytes_per_block


def count(options: CacheOptions, max_requests: int = 4, max_model_len: int = 1000, layout: CacheLayout = LAYOUT) -> int:
    return memory.count_blocks(options, layout, CPU, max_requests, max_model_len)


def test_the_layout_of_these_tests_is_as_the_numbers_below_assume() -> None:
    assert BYTES >= 640 and LAYOUT.bytes_per_slot >= 500 and LAYOUT.block_tokens == 128


def test_num_blocks_is_taken_as_it_is() -> None:
    assert count(CacheOptions(num_blocks=7)) == 7


@pytest.mark.parametrize(("num_bytes", "expected"), [(BYTES, 1), (2 * BYTES - 1, 1), (50 * BYTES, 50)])
def test_kv_cache_bytes_are_filled_with_whole_blocks(num_bytes: int, expected: int) -> None:
    assert count(CacheOptions(kv_cache_bytes=num_bytes)) == expected


def test_fewer_bytes_than_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_bytes is {BYTES - 1}, but one block of 128 tokens takes {BYTES}"):
        count(CacheOptions(kv_cache_bytes=BYTES - 1))


@pytest.mark.parametrize(("max_model_len", "expected"), [(1000, 32), (128, 4), (129, 8)])
def test_without_a_limit_every_request_has_room_at_full_length(
    monkeypatch: pytest.MonkeyPatch, max_model_len: int, expected: int
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    assert count(CacheOptions(), max_model_len=max_model_len) == expected


def test_without_a_limit_free_memory_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * BYTES + 1)
    assert count(CacheOptions()) == 3


def test_what_steps_and_graphs_take_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10 * BYTES)
    for other_bytes, expected in ((3 * BYTES, 7), (3 * BYTES + 1, 6), (9 * BYTES, 1)):
        assert memory.count_blocks(CacheOptions(), LAYOUT, CPU, 4, 1000, other_bytes) == expected
    with pytest.raises(ConfigError, match=f"leave {BYTES - 1} bytes of cpu to the cache, but one block of 128 tokens"):
        memory.count_blocks(CacheOptions(), LAYOUT, CPU, 4, 1000, 9 * BYTES + 1)


def test_a_model_that_keeps_nothing_in_blocks_has_as_many_as_its_requests_count() -> None:
    windows = CacheLayout((CacheGroup("w", "slot", 100, 5),), 128)
    assert count(CacheOptions(), layout=windows) == count(CacheOptions(kv_cache_bytes=1), layout=windows) == 32


def test_free_bytes_of_the_host_are_a_share_of_its_memory() -> None:
    assert 0 < memory.free_bytes(CPU) < memory.total_bytes(CPU)


def test_caches_that_cannot_fit_are_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 11 * BYTES + 5 * LAYOUT.bytes_per_slot
    monkeypatch.setattr(memory, "total_bytes", lambda device: wanted)
    memory.check_memory(LAYOUT, 10, 4, CPU)
    monkeypatch.setattr(memory, "total_bytes", lambda device: wanted - 1)
    with pytest.raises(
        ConfigError, match=f"10 cache blocks and 4 slots .* take {wanted} bytes, but cpu has {wanted - 1}"
    ):
        memory.check_memory(LAYOUT, 10, 4, CPU)
