"""Requests that come, end and are preempted while drafts follow captured steps get the texts of plain steps (nano)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepinfer
from deepinfer import SamplingParams
from deepinfer.backends.cpu.library import is_available
from deepinfer.backends.cuda.device import runs_hopper_ops
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.core import EngineCore
from deepinfer.engine.launch import launch
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.messages import GenerateRequest
from deepinfer.runner.speculation import Speculation
from recorders import FakeRecorder

DATA = Path(deepinfer.__file__).parent / "data" / "deepinfer-nano"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_card = pytest.mark.skipif(not runs_hopper_ops(DEVICE), reason="no Hopper card with triton")
on_cpu = pytest.mark.skipif(not is_available(), reason="texts are compared bit for bit, which needs a C++ compiler")
NUM_REQUESTS = 60


def make_core(monkeypatch: pytest.MonkeyPatch, **options: Any) -> EngineCore:
    """An engine that moves when `step` is called."""
    monkeypatch.setattr("deepinfer.engine.launch.EngineClient", lambda core, *given, **fields: core)
    engine = launch(EngineConfig.from_options({"batch_invariant": True, **options}), DATA)
    assert isinstance(engine.client, EngineCore)
    return engine.client


def make_requests(draw: random.Random) -> list[tuple[GenerateRequest, int, int]]:
    """Requests, the step in which each comes, and after how many tokens it is ended from outside."""
    records = [json.loads(line) for line in (DATA / "eval" / "eval.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer(DATA)
    texts = [tokenizer.encode(record["prompt"]) for record in records[::20] if "image" not in record["skill"]]
    made = []
    for number in range(NUM_REQUESTS):
        start = draw.randrange(60)
        tokens = (texts[draw.randrange(len(texts))] + texts[number])[
            start : start + draw.choice((3, 118, 121, 124, 125, 126))
        ]
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.0, 0.8)),
            seed=number,
            max_tokens=draw.choice((1, 2, 9, 30, 60, 60)),
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=tuple(draw.sample(range(20, 400), 20)) if draw.random() < 0.3 else (),
            repetition_penalty=1.2 if draw.random() < 0.05 else 1.0,
        )
        request = GenerateRequest(f"r{number}", np.array(tokens or [5], dtype=np.int32), params, 0.0)
        made.append((request, number // 6 * 20, draw.choice((1, 2, 7, 25, 99, 99, 99, 99))))
    return made


def answers(core: EngineCore, requests: list[tuple[GenerateRequest, int, int]]) -> dict[str, tuple[list[int], str]]:
    """Tokens of each request and why it ended."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request, _, _ in requests}
    ends = {request.request_id: end for request, _, end in requests}
    reasons: dict[str, str] = {}
    waiting, number = sorted(requests, key=lambda one: one[1]), 0
    while waiting or core.has_work():
        while waiting and (waiting[0][1] <= number or not core.has_work()):
            core.add(waiting.pop(0)[0])
        output, number = core.step(), number + 1
        if output is None:
            continue
        for name, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            tokens[name].append(token)
        reasons |= {finished.request_id: finished.reason for finished in output.finished}
        for name in set(output.request_ids):
            if name not in reasons and len(tokens[name]) >= ends[name]:
                core.finish(name, "abort" if ends[name] % 2 else "stop")
    core.close()
    return {name: (tokens[name], reasons[name]) for name in tokens}


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_card)])
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {"draft_scheduling": False}),
        (1, {"draft_scheduling": False, "async_scheduling": False, "num_draft_tokens": 2}),
        (2, {"draft_scheduling": True}),
    ],
)
def test_requests_that_come_and_go_keep_their_texts(
    monkeypatch: pytest.MonkeyPatch, device: str, seed: int, options: dict[str, Any]
) -> None:
    if device == "cpu":
        monkeypatch.setattr("deepinfer.runner.build.captures_steps", lambda options, ops: not options.enforce_eager)
        monkeypatch.setattr("deepinfer.runner.build.CudaRecorder", FakeRecorder)
    followed, follow = [], Speculation.follow
    monkeypatch.setattr(Speculation, "follow", lambda *given: followed.append(follow(*given)) or followed[-1])
    requests = make_requests(random.Random(seed))
    plain = make_core(monkeypatch, device=device, num_draft_tokens=0, enforce_eager=True, async_scheduling=False)
    expected = answers(plain, [(request, 0, NUM_REQUESTS) for request, _, _ in requests])
    assert not any(followed)
    core = make_core(monkeypatch, device=device, max_num_requests=6, num_blocks=3, max_step_tokens=192, **options)
    found = answers(core, requests)
    for (name, (tokens, reason)), (_, _, end) in zip(found.items(), requests, strict=True):
        whole, why = expected[name]
        assert tokens == whole[: len(tokens)], name
        assert reason == why or len(tokens) >= min(end, len(whole)), name
    assert {"abort", "stop", "length"} <= {reason for _, reason in found.values()}
    assert core.stats().num_free_blocks == 3
    if not options["draft_scheduling"]:  # which goes by times
        assert core.stats().num_preemptions > 0 and sum(followed) > 20
