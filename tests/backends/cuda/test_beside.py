"""Work on a second stream in captured steps, and on the same one otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from backends.cuda import pair
from deepinfer.backends.cuda.hopper.beside import beside
from deepinfer.runner.graph_cache import CudaRecorder


def test_work_that_is_not_captured_is_done_at_once():
    done = []

    def work():
        done.append(torch.ones(2))
        return done[0]

    result = beside(work)
    assert len(done) == 1 and result() is done[0]


@pair.on_device
def test_captured_work_runs_on_another_stream_and_is_waited_for():
    x, streams, graph = torch.ones(1 << 22, device=pair.DEVICE), [], torch.cuda.CUDAGraph()

    def work():
        streams.append(torch.cuda.current_stream())
        made = x
        for _ in range(50):
            made = made * 0.5 + 1
        return made

    with torch.cuda.graph(graph):
        result = beside(work)
        streams.append(torch.cuda.current_stream())
        total = x + result()
    for _ in range(3):
        total.zero_()
        graph.replay()
        assert streams[0] != streams[1] and bool((total > 2.9).all())


@pair.on_device
def test_two_captures_at_a_time_have_second_streams_of_their_own():
    x, sums = torch.ones(1 << 16, device=pair.DEVICE), []
    first, second = CudaRecorder(), CudaRecorder()

    def inner():
        result = beside(lambda: x * 2)
        sums[1:] = [x + 1 + result()]

    def outer():
        result = beside(lambda: x * 3)
        if torch.cuda.is_current_stream_capturing():
            thread = threading.Thread(target=lambda: replays.append(second.record(inner)))
            thread.start()
            thread.join()
        sums[:1] = [x + result()]

    replays: list[Callable[[], None]] = []
    replays.append(first.record(outer))
    for total in sums:
        total.zero_()
    for replay in replays:
        replay()
    assert [total[0].item() for total in sums] == [4, 4] and len(replays) == 2


@pair.on_device
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_capture_that_fails_between_fork_and_join_leaves_the_next_one_whole(is_inside):
    x, sums, recorder = torch.ones(1 << 16, device=pair.DEVICE), [], CudaRecorder()

    def work(fails: bool) -> torch.Tensor:
        if fails and is_inside and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("inside")
        return x * 2

    def call(fails: bool) -> None:
        result = beside(lambda: work(fails))
        if fails and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("before the join")
        sums[:] = [x + result()]

    with pytest.raises(RuntimeError):
        recorder.record(lambda: call(fails=True))
    replay = recorder.record(lambda: call(fails=False))
    sums[0].zero_()
    replay()
    assert bool((sums[0] == 3).all())
