"""Which images are encoded when, which embeddings stay, and that no chunk cuts an image."""

from __future__ import annotations

import random

import pytest

from deepinfer.errors import QueueFullError, RequestError
from deepinfer.images.messages import ImageSpan
from deepinfer.scheduler.budget import StepBudget
from deepinfer.scheduler.images import chunk_end

from .image_engine import ImageEngine, image, request


def chunks(engine: ImageEngine) -> list[tuple[int, int]]:
    """Start and end of each prefill row, of one request."""
    return [
        (start, start + count)
        for plan in engine.history
        for start, count, is_prefill in zip(plan.starts, plan.counts, plan.is_prefill, strict=True)
        if is_prefill
    ]


# -- chunks


def test_a_chunk_ends_before_an_image_or_holds_all_of_it() -> None:
    spans = (ImageSpan(3, image(1, 4)), ImageSpan(7, image(2, 2)), ImageSpan(12, image(3, 5)))
    ends = {end: chunk_end(spans, 0, end) for end in range(1, 19)}
    assert [end for end, found in ends.items() if end == found] == [1, 2, 3, 7, 9, 10, 11, 12, 17, 18]
    assert (ends[4], ends[6], ends[8], ends[13], ends[16]) == (3, 3, 7, 12, 12)
    assert [chunk_end(spans, 3, end) for end in (4, 6, 7, 8, 9)] == [7, 7, 7, 7, 9]
    assert chunk_end(spans, 12, 13) == 17


def test_an_image_may_exceed_a_chunk_but_not_what_is_left_of_the_step() -> None:
    budget = StepBudget(max_step_tokens=10, max_chunk_tokens=2, max_prefill_tokens=10)
    assert budget.take_chunk(20, lambda count: 7) == 7
    assert budget.take_chunk(20, lambda count: 4) == 0
    assert budget.prefill_left == 3


@pytest.mark.parametrize("max_chunk_tokens", [1, 2, 3, 5, None])
def test_prompts_are_cut_between_images_only(max_chunk_tokens: int | None) -> None:
    engine = ImageEngine(max_chunk_tokens=max_chunk_tokens, max_step_tokens=12)
    asked = request("a", [1, 2, image(1, 5), image(2, 3), 3, 4, 5, image(3, 4), 6])
    engine.send(asked)
    engine.run_all()
    assert engine.tokens("a") == engine.direct("a")
    assert chunks(engine)[-1][1] == len(asked.token_ids)
    for start, end in chunks(engine):
        assert not any(span.start < cut < span.end for span in asked.images for cut in (start, end))
        assert max_chunk_tokens is None or end - start <= max(max_chunk_tokens, 5)


def test_places_name_each_image_once() -> None:
    engine = ImageEngine(max_chunk_tokens=4)
    engine.send(request("a", [1, image(1, 5), 2, image(2, 3), image(1, 5)]))
    engine.run_all()
    places = [(place.start, place.num_tokens, place.key) for plan in engine.history for place in plan.images]
    assert places == [(1, 5, b"\1\5"), (7, 3, b"\2\3"), (10, 5, b"\1\5")]


def test_an_image_that_fits_in_no_step_is_refused() -> None:
    engine = ImageEngine(max_step_tokens=8, num_slots=4)
    engine.send(request("fits", [image(1, 5)]))
    with pytest.raises(
        RequestError, match="'b' has an image of 6 tokens, computed in one step, but a step has room for 5"
    ):
        engine.send(request("b", [image(2, 6)]))
    engine.run_all()


# -- encoding


def test_a_request_waits_for_its_images_and_nobody_else_does() -> None:
    engine = ImageEngine()
    engine.send(request("seeing", [1, image(1)]))
    engine.send(request("reading", [1, 2]))
    engine.encode()
    for _ in range(4):
        engine.step()
    assert engine.reason("reading") == "length" and engine.tokens("seeing") == []
    assert (engine.scheduler.num_waiting, engine.scheduler.has_work()) == (1, False)
    engine.run_all()
    assert engine.tokens("seeing") == engine.direct("seeing")


def test_images_are_encoded_in_order_within_the_budget() -> None:
    engine = ImageEngine(patches=6)
    engine.send(request("a", [image(1, 3), image(2, 2), image(3, 4), image(1, 3)]))
    engine.send(request("late", [image(4, 9)]))
    engine.send(request("first", [image(5, 2)], priority=-1))
    engine.run_all()
    assert engine.encoded == [[b"\5\2", b"\1\3"], [b"\2\2", b"\3\4"], [b"\4\x09"]]


def test_an_image_is_encoded_once_for_all() -> None:
    engine = ImageEngine()
    for name in "abc":
        engine.send(request(name, [image(1), 1, image(1)]))
    engine.run_all()
    engine.send(request("later", [image(1)]))
    engine.run_all()
    assert engine.encoded == [[image(1).key]]


def test_an_image_that_is_being_encoded_is_not_encoded_again() -> None:
    engine = ImageEngine()
    engine.send(request("first", [image(1)]))
    engine.encode()
    assert engine.encoding is not None
    engine.send(request("second", [1, image(1), image(2)]))
    engine.run_all()
    assert engine.encoded == [[image(1).key], [image(2).key]]
    assert [engine.tokens(name) for name in ("first", "second")] == [engine.direct(n) for n in ("first", "second")]


def test_equal_pixels_of_several_requests_are_kept_once() -> None:
    engine = ImageEngine()
    for name in "ab":
        engine.send(request(name, [image(1), image(1)]))
    spans = [span for waiting in engine.scheduler._table._requests.values() for span in waiting.images]
    assert len(spans) == 4 and len({id(span.image.pixels) for span in spans}) == 1
    engine.run_all()


def test_the_least_recently_used_embedding_makes_room() -> None:
    engine = ImageEngine(cache_tokens=9)
    for name, number in zip("abcdef", (1, 2, 3, 1, 4, 2), strict=True):
        engine.send(request(name, [image(number)]))
        engine.run_all()
    assert [keys[0][0] for keys in engine.encoded] == [1, 2, 3, 4, 2]  # 4 takes the place of 2


def test_embeddings_of_waiting_requests_are_never_dropped() -> None:
    engine = ImageEngine(cache_tokens=6, num_slots=1, max_step_tokens=8)
    for name, number in zip("abcd", (1, 2, 3, 4), strict=True):
        engine.send(request(name, [image(number)], max_tokens=9))
    engine.encode()
    engine.encode()
    assert engine.images.num_bytes == 6 and engine.scheduler.num_waiting == 4  # two have room, two wait for it
    engine.run_all()
    assert [engine.tokens(name) for name in "abcd"] == [engine.direct(name) for name in "abcd"]


def test_room_is_given_in_order_and_as_a_whole() -> None:
    engine = ImageEngine(cache_tokens=7)
    engine.send(request("large", [image(1), image(2)]))
    engine.send(request("larger", [image(3), image(4, 4)]))
    engine.send(request("small", [image(5, 1)]))
    engine.encode()
    assert engine.encoded == [[image(1).key, image(2).key]]  # the small one does not overtake
    engine.run_all()
    assert all(engine.reason(name) == "length" for name in ("large", "larger", "small"))


def test_images_that_never_fit_are_refused() -> None:
    engine = ImageEngine(cache_tokens=8)
    with pytest.raises(RequestError, match="the embeddings of its images take 9 bytes, but there is room for 8"):
        engine.send(request("a", [image(1), image(2), image(3)]))
    engine.send(request("b", [image(1), image(1), image(1)]))  # one image, three times
    engine.run_all()


def test_queued_pixels_are_bounded() -> None:
    engine = ImageEngine(queue_bytes=30)
    with pytest.raises(RequestError, match="the pixels of its images take 36 bytes, but image_queue_bytes is 30"):
        engine.send(request("no", [image(1), image(2), image(3)]))
    engine.send(request("a", [image(1), image(2)]))
    engine.send(request("b", [image(2)]))  # the same pixels
    with pytest.raises(QueueFullError, match="images of other requests take 24 bytes already"):
        engine.send(request("c", [image(3)]))
    engine.scheduler.finish("a", "abort")
    engine.send(request("c", [image(3)]))  # of image 2 there is one use left


def test_requests_that_wait_for_images_count_to_the_queue() -> None:
    engine = ImageEngine(max_queue=2)
    for name in "ab":
        engine.send(request(name, [image(1)]))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.send(request("c", [image(1)]))
    with pytest.raises(RequestError, match="'a' is in use"):
        engine.send(request("a", [image(1)]))
    engine.run_all()


@pytest.mark.parametrize("when", ["in line", "planned", "encoded"])
def test_an_aborted_request_leaves_nothing_held(when: str) -> None:
    engine = ImageEngine(cache_tokens=4)
    engine.send(request("gone", [image(1)]))
    for _ in range(["in line", "planned", "encoded"].index(when)):
        engine.encode()
    assert engine.scheduler.finish("gone", "abort")
    engine.send(request("next", [image(2, 4)]))  # needs all the room
    engine.run_all()
    assert engine.tokens("next") == engine.direct("next")


def test_images_that_nobody_waits_for_any_more_are_not_encoded() -> None:
    engine = ImageEngine(patches=1, cache_tokens=9)
    for name, number in zip("abc", (1, 2, 3), strict=True):
        engine.send(request(name, [image(number)]))
    engine.encode()
    engine.scheduler.finish("b", "abort")
    engine.run_all()
    assert engine.encoded == [[image(1).key], [image(3).key]]
    assert engine.images.num_bytes == 6


def test_an_abort_with_a_step_in_flight_keeps_the_embedding_until_its_result() -> None:
    engine = ImageEngine(cache_tokens=4, depth=2)
    engine.send(request("gone", [1, image(1)]))
    engine.encode()
    engine.encode()
    assert engine.plan() is not None
    engine.scheduler.finish("gone", "abort")
    engine.send(request("next", [image(2, 4)]))
    engine.encode()
    assert engine.encoding is None  # no room yet
    engine.finish_oldest()
    engine.run_all()
    assert engine.tokens("next") == engine.direct("next")


def test_a_preempted_request_claims_its_embeddings_again() -> None:
    engine = ImageEngine(cache_tokens=4)
    engine.send(request("a", [1, image(1)], max_tokens=6))
    engine.encode()
    engine.encode()
    engine.step()
    engine.step()  # the prompt of `a` is computed, its embedding may go
    engine.send(request("b", [image(2, 4)]))
    engine.encode()
    engine.encode()
    engine.scheduler._table.preempt(1)
    engine.scheduler.check()
    engine.run_all()
    assert engine.encoded == [[image(1).key], [image(2, 4).key], [image(1).key]]
    assert [engine.tokens(name) for name in "ab"] == [engine.direct(name) for name in "ab"]


def test_random_requests_with_images_are_all_answered() -> None:
    """Tight pools and caches, preemption, aborts, an encoder that takes its time: invariants after each step."""
    num_preemptions = num_again = 0
    for seed in range(60):
        draw = random.Random(seed)
        num_slots, largest = draw.choice([1, 4, 6]), draw.choice([2, 4, 6])
        engine = ImageEngine(
            num_slots=num_slots,
            num_blocks=draw.choice([12, 13, 40]),
            max_model_len=48,
            max_step_tokens=num_slots + largest - 1 + draw.choice([0, 3, 30]),
            max_chunk_tokens=draw.choice([None, 1, 3]),
            cache_tokens=draw.choice([3 * largest, 4 * largest, 100]),
            patches=draw.choice([1, 5, 100]),
            depth=draw.choice([1, 2, 3]),
            max_prefill_tokens=draw.choice([None, None, 2, 9]),
        )
        for number in range(draw.randint(2, 8)):
            parts = [draw.randrange(10, 50) for _ in range(draw.randint(1, 5))]
            for _ in range(draw.choice([0, 1, 1, 2, 3])):
                kind = draw.randrange(6)
                parts.insert(draw.randint(0, len(parts)), image(kind, min(largest, kind + 1)))
            engine.send(request(f"r{number}", parts, draw.randint(1, 20), priority=draw.choice([0, 0, 1])))
            if draw.random() < 0.5:
                engine.encode()
                engine.step()
        aborted = [name for name in engine.answers if draw.random() < 0.1 and engine.scheduler.finish(name, "abort")]
        engine.run_all(draw)
        for name, answer in engine.answers.items():
            assert answer.finished is not None, (seed, name)
            if name not in aborted:
                assert (answer.tokens, answer.finished.reason) == (engine.direct(name), "length"), (seed, name)
        num_preemptions += engine.scheduler.num_preemptions
        keys = [key for plan in engine.encoded for key in plan]
        num_again += len(keys) - len(set(keys))
        assert engine.images.num_waiting == 0
    assert num_preemptions > 8 and num_again > 4, (num_preemptions, num_again)
