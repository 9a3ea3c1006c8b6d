"""Threads and prompt tokens of a step when nobody says, and where batch invariance is granted."""

from __future__ import annotations

import os

import pytest
import torch

from backends.cpu import pair
from deepinfer.backends import select
from deepinfer.backends.select import default_threads, short_prefill
from deepinfer.config.engine import ModelOptions
from deepinfer.errors import ConfigError


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (64, 4)])
def test_threads_are_the_usable_cores_up_to_four(monkeypatch, cores, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert default_threads() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), ("9999999999", 1024), ("0", 2), ("4,2", 2), ("", 2), ("\N{SUPERSCRIPT TWO}", 2), ("9" * 5000, 2)],
)
def test_omp_num_threads_is_heeded_where_it_is_a_number(monkeypatch, text, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert default_threads() == expected


@pytest.mark.parametrize("count", [0, 1025, 2.0])
def test_numbers_of_threads_that_no_machine_has_are_refused(count):
    with pytest.raises(ConfigError, match="num_threads"):
        ModelOptions(num_threads=count)


def test_steps_on_a_cpu_take_few_prompt_tokens():
    cpu = torch.device("cpu")
    for has_tiles, expected in ((False, 128), (True, 256)):
        with pair.tiles(has_tiles):
            assert short_prefill(cpu, pair.cpu()) == expected
            assert short_prefill(cpu, pair.reference()) == 128
    assert short_prefill(torch.device("cuda"), pair.reference()) is None


@pytest.mark.parametrize("is_hopper", [False, True])
def test_batch_invariance_is_granted_on_cuda_where_hopper_ops_run(monkeypatch, is_hopper):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(select, "choose_device", lambda options: torch.device("cuda"))
    monkeypatch.setattr(select, "runs_hopper_ops", lambda device: is_hopper)
    options = ModelOptions(device="cuda", batch_invariant=True)
    if is_hopper:
        assert select.load_ops(options).origin["experts"] == "hopper"
    else:
        with pytest.raises(ConfigError, match="batch_invariant is true, but torch's ops do not promise it"):
            select.load_ops(options)
