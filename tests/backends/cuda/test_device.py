"""Which devices run the Hopper ops."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from deepinfer.backends.cuda import device


@pytest.mark.parametrize(("version", "expected"), [((9, 0), True), ((8, 9), False), ((10, 0), False)])
def test_only_hopper_cards_run_them(monkeypatch, version, expected):
    monkeypatch.setattr(device, "capability", lambda card: version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert device.runs_hopper_ops(torch.device("cuda")) == expected


def test_a_cpu_does_not_and_a_card_without_triton_neither(monkeypatch):
    assert not device.runs_hopper_ops(torch.device("cpu"))
    monkeypatch.setattr(device, "capability", lambda card: device.HOPPER)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not device.runs_hopper_ops(torch.device("cuda"))
