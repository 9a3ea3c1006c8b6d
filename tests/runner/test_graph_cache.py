"""Which shapes are recorded, which are replayed and which are dropped."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import pytest
import torch

from deepinfer.backends.cuda.native import BuildError
from deepinfer.log import warn_once
from deepinfer.runner.graph_cache import MAX_GRAPHS, RIPE, CudaRecorder, GraphCache
from recorders import FakeRecorder


class Steps:
    """A cache and what it did with the shapes it saw: e(ager), c(aptured and replayed) or r(eplayed)."""

    def __init__(
        self,
        *bytes_each: int,
        max_bytes: int = 100,
        max_graphs: int = MAX_GRAPHS,
        room: int | None = None,
        errors: Iterable[Exception] = (),
    ) -> None:
        self.recorder = FakeRecorder(*bytes_each, room=room, errors=errors)
        self.cache = GraphCache(self.recorder, max_bytes, max_graphs)

    def run(self, *shapes: Hashable) -> str:
        done = ""
        for shape in shapes:
            recorded = self.recorder.num_recorded
            found = self.cache.find(shape, lambda shape=shape: (shape, self.recorder.record(lambda: None)))
            assert found is None or found[0] == shape
            done += "e" if found is None else "r" if recorded == self.recorder.num_recorded else "c"
        return done


def test_a_shape_is_recorded_when_it_comes_for_the_fourth_time() -> None:
    assert RIPE == 4 and Steps().run(*"aaaaaaa") == "eeecrrr"


def test_what_was_recorded_is_known_without_counting_as_a_use() -> None:
    steps = Steps(max_graphs=2)
    assert not steps.cache.has("a") and steps.run(*"aaaa") == "eeec" and steps.run(*"bbbb") == "eeec"
    assert steps.cache.has("a") and steps.cache.has("b") and not steps.cache.has("c")
    assert steps.run(*"cccc") == "eeec" and not steps.cache.has("a")  # it was used longest ago


def test_shapes_are_counted_apart_and_need_not_come_in_a_row() -> None:
    assert Steps().run(*"ababaabbab") == "eeeeececrr"


def test_a_load_of_many_shapes_records_nothing() -> None:
    steps = Steps()
    assert steps.run(*range(1000)) == "e" * 1000 and steps.recorder.num_recorded == 0


def test_what_was_used_longest_ago_is_dropped_and_counts_from_zero_again() -> None:
    steps = Steps(max_graphs=2)
    assert steps.run(*"aaaabbbb") == "eeeceeec"
    assert steps.run(*"a") == "r"
    assert steps.run(*"cccc") == "eeec"  # and b goes
    assert steps.run(*"acbbb") == "rreee"
    assert steps.run(*"b") == "c" and len(steps.cache) == 2  # and a goes
    assert steps.run(*"cab") == "rer"


def test_recording_stays_a_share_of_a_load_with_more_shapes_than_graphs() -> None:
    steps = Steps(max_graphs=3)
    done = steps.run(*(list(range(4)) * 50))
    assert done.startswith("eeeeeeeeeeeecccc" + "errrerrrerrrc" * 2) and done.count("c") < 20 and done.count("r") > 100


def test_all_are_dropped_when_they_hold_too_much_together() -> None:
    steps = Steps(40, max_bytes=100)
    assert steps.run(*"aaaabbbb") == "eeeceeec" and steps.recorder.num_bytes == 80
    assert steps.run(*"cccc") == "eeee" and steps.recorder.num_resets == 1
    assert len(steps.cache) == 0 and steps.recorder.num_bytes == 0
    assert steps.run(*"ccccbbbbaaa") == "eeeceeeceee"


def test_a_shape_that_is_too_large_alone_is_recorded_once() -> None:
    steps = Steps(101, 10, max_bytes=100)
    assert steps.run(*"aaaa") == "eeee" and steps.recorder.num_recorded == 1
    assert steps.run(*"aaaaaaaabbbb") == "eeeeeeeeeeec" and steps.recorder.num_recorded == 2
    assert steps.run(*"ba") == "re"


def test_what_the_device_has_no_room_for_runs_without_a_graph() -> None:
    steps = Steps(60, 60, 60, 101, 101, 10, room=100)
    assert steps.run(*"aaaabbbb") == "eeeceeee" and steps.recorder.num_resets == 1 and len(steps.cache) == 0
    assert steps.run(*"bbbb") == "eeec"  # alone it fits
    assert steps.run(*"cccc") == "eeee" and steps.recorder.num_resets == 2
    assert steps.run(*"cccccccc") == "eeeeeeee" and steps.recorder.num_recorded == 5  # not even alone
    assert steps.run(*"aaaaa") == "eeecr"


CAPTURE_ERRORS = [
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing\nSearch for"),
    RuntimeError("Triton Error [CUDA]: operation failed due to a previous error during capture"),
    BuildError("cuLaunchKernel failed: unknown error"),
    RuntimeError(),
]


@pytest.mark.parametrize("error", CAPTURE_ERRORS, ids=lambda error: type(error).__name__)
def test_a_shape_that_cannot_be_recorded_runs_without_a_graph_and_is_told_once(
    caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    warn_once.cache_clear()
    steps = Steps(errors=[error, error])
    assert steps.run(*"aaaaaaaa") == "eeeeeeee" and steps.recorder.num_recorded == 1
    assert steps.recorder.num_resets == 1, "memory of a broken capture is given back"
    assert steps.run(*"bbbbbccccc") == "eeeeeeeecr", "other shapes are tried"
    words = str(error).partition("\n")[0] or "RuntimeError"
    assert caplog.messages == [f"no CUDA graph of a step ({words}); its kernels are launched one by one"]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_graph_that_finds_no_memory_is_tried_again_when_others_are_gone(kind: type[Exception]) -> None:
    class Late(FakeRecorder):
        def record(self, call):  # type: ignore[no-untyped-def]
            if self.num_recorded == 1 and not self.num_resets:
                self.num_recorded += 1
                raise kind("CUDA error: out of memory")
            return super().record(call)

    steps = Steps()
    steps.recorder = steps.cache.recorder = Late()
    assert steps.run(*"aaaabbbb") == "eeeceeee" and len(steps.cache) == 0
    assert steps.run(*"bbbbb") == "eeecr"


def test_what_is_wrong_with_the_program_is_no_reason_to_go_on() -> None:
    steps = Steps(errors=[AssertionError("rows")])
    with pytest.raises(AssertionError, match="rows"):
        steps.run(*"aaaa")


class FakeGraph:
    """Stands for torch.cuda.CUDAGraph. broken: its capture cannot be ended."""

    broken = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        made.append(self)

    def capture_begin(self, pool: object, mode: str) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.broken or self.calls.count("end") > 1:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.calls.append("replay")


made: list[FakeGraph] = []
SEGMENTS = [{"total_size": size, "segment_pool_id": (0, pool)} for size, pool in ((2, 7), (100, 0), (3, 7), (50, 8))]


class FakeStream:
    """Stands for torch.cuda.Stream, and for the context in which it is the current one."""

    def wait_stream(self, other: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.mark.parametrize("is_broken", [False, True], ids=["call", "end"])
def test_a_capture_that_fails_is_ended_for_stream_and_allocator(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    ended: list[object] = []
    for name, value in (
        ("graph_pool_handle", lambda: (0, 7)), ("Stream", FakeStream), ("CUDAGraph", FakeGraph),
        ("current_stream", FakeStream), ("memory_snapshot", lambda: SEGMENTS), ("stream", lambda stream: stream),
        ("current_device", lambda: 0),
    ):  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    monkeypatch.setattr("torch._C._cuda_endAllocateToPool", lambda *given: ended.append(given))
    monkeypatch.setattr(FakeGraph, "broken", is_broken)
    made.clear()
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) == 2 and not is_broken:
            raise RuntimeError("cannot be captured")

    recorder = CudaRecorder()
    with pytest.raises(RuntimeError, match="previous error" if is_broken else "cannot be captured"):
        recorder.record(call)
    assert made[0].calls == ["begin", "end", "end"][: 2 + is_broken] and ended == [(0, (0, 7))]
    monkeypatch.setattr(FakeGraph, "broken", False)
    recorder.record(call)()
    assert made[1].calls == ["begin", "end", "replay"] and len(ended) == 1
    assert recorder.num_bytes == 5, "what others hold is not the graphs'"


@pytest.mark.parametrize("seed", range(5))
def test_bounds_hold_after_every_step_of_a_random_load(seed: int) -> None:
    draw = np.random.default_rng(seed)
    steps = Steps(*draw.integers(0, 30, 500).tolist(), max_bytes=100, max_graphs=5)
    for shape in draw.geometric(0.15, 2000).tolist():
        steps.run(shape)
        assert len(steps.cache) <= 5 and steps.recorder.num_bytes <= 100
    assert steps.recorder.num_recorded <= 2000 // RIPE and steps.recorder.num_resets > 0
