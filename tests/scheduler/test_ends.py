"""Ends from outside, abort and text stop, at every point of a request's life."""

import pytest

from null_engine import NullEngine


def waiting(engine):
    engine.add("other", 5, max_tokens=12)
    engine.step()
    engine.add("a", 9)


def prefilling(engine):
    engine.add("other", 5, max_tokens=12)
    engine.add("a", 9)
    engine.step()
    engine.step()


def running(engine):
    engine.add("a", 2, max_tokens=20)
    engine.add("other", 5, max_tokens=12)
    for _ in range(4):
        engine.step()
    assert engine.tokens("a")


def in_flight(engine):
    engine.add("a", 2, max_tokens=20)
    engine.add("other", 5, max_tokens=12)
    for _ in range(4):
        engine.step()
    for _ in range(3):
        engine.plan()


def preempted(engine):
    engine.add("other", 5, max_tokens=12)
    engine.add("a", 3, max_tokens=12)
    for _ in range(100):
        if engine.scheduler.num_preemptions:
            break
        engine.plan()
        engine.plan()
        if not engine.scheduler.num_preemptions:
            engine.finish_oldest()
    assert "a" in engine.scheduler._queue and engine.scheduler._table.draining


def drained(engine):
    preempted(engine)
    while engine.plans:
        engine.finish_oldest()
    assert "a" in engine.scheduler._queue and not engine.scheduler._table.draining


POINTS = {
    waiting: {"num_slots": 1},
    prefilling: {"max_step_tokens": 4, "max_chunk_tokens": 2},
    running: {},
    in_flight: {},
    preempted: {"num_blocks": 4, "max_step_tokens": 12},
    drained: {"num_blocks": 4, "max_step_tokens": 12},
}


@pytest.mark.parametrize("reason", ["abort", "stop"])
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_a_request_ends_at_any_point_once_and_others_go_on(point, reason):
    engine = NullEngine(**POINTS[point])
    point(engine)
    tokens = list(engine.tokens("a"))
    assert engine.reason("a") is None
    done = engine.scheduler.finish("a", "abort") if reason == "abort" else engine.scheduler.finish("a", reason)
    assert done
    engine.scheduler.check()
    assert not engine.scheduler.finish("a", "abort") and not engine.scheduler.finish("a", "stop")
    engine.run()
    assert (engine.tokens("a"), engine.reason("a")) == (tokens, reason)
    assert engine.tokens("other") == engine.direct("other")
    assert engine.answers["a"].finished.num_preemptions == (point in (preempted, drained))


def test_ends_of_unknown_requests_are_denied():
    engine = NullEngine()
    assert not engine.scheduler.finish("nobody", "abort")
    engine.add("a", 3)
    assert not engine.scheduler.finish("nobody", "stop")
    engine.run()
    assert not engine.scheduler.finish("a", "abort")


def test_an_end_is_handed_out_at_once_by_take_finished():
    engine = NullEngine()
    engine.add("a", 3)
    engine.scheduler.finish("a", "abort")
    assert not engine.scheduler.has_work()
    (finished,) = engine.scheduler.take_finished()
    assert (finished.request_id, finished.reason) == ("a", "abort")
    assert (finished.times.scheduled, finished.times.first_token) == (None, None)
    assert engine.scheduler.take_finished() == []


def test_an_end_is_handed_out_by_the_next_update_otherwise():
    engine = NullEngine()
    engine.add("a", 3)
    engine.plan()
    engine.scheduler.finish("a", "abort")
    output = engine.finish_oldest()
    assert [finished.request_id for finished in output.finished] == ["a"]
    assert output.request_ids == []
