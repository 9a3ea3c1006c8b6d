"""Work on a second stream in captured steps, and on the same one otherwise."""

from __future__ import annotations

import torch

from backends.cuda import pair
from deepinfer.backends.cuda.hopper.beside import beside


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
