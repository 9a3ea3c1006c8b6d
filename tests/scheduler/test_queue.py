import random

import numpy as np
import pytest

from deepinfer.errors import QueueFullError
from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.queue import WaitingQueue
from deepinfer.scheduler.request import Request

PROMPT, PARAMS = np.zeros(1, dtype=np.int32), SamplingParams(max_tokens=1)


def request(name, sequence, priority=0):
    return Request(name, PROMPT, PARAMS, priority, 0.0, sequence, 0, False)


def drain(queue):
    return [queue.take_first().request_id for _ in range(len(queue))]


def test_lower_priority_number_goes_first_and_arrivals_keep_their_order_inside():
    queue = WaitingQueue(10)
    for sequence, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", -2), ("e", 0)]):
        queue.add(request(name, sequence, priority))
    assert drain(queue) == ["d", "b", "e", "a", "c"]


def test_a_request_put_back_goes_before_later_arrivals_of_its_priority_only():
    queue = WaitingQueue(10)
    queue.add(request("urgent", 5, -1))
    queue.add(request("later", 6))
    queue.put_back(request("preempted", 2))
    queue.put_back(request("older", 1))
    assert drain(queue) == ["urgent", "older", "preempted", "later"]


def test_first_leaves_the_request_in_place():
    queue = WaitingQueue(10)
    assert queue.first() is None
    queue.add(request("a", 0))
    assert queue.first() is queue.first()
    assert len(queue) == 1 and "a" in queue


def test_add_refuses_at_the_bound_with_true_numbers_and_put_back_does_not():
    queue = WaitingQueue(2)
    queue.add(request("a", 0))
    queue.add(request("b", 1))
    with pytest.raises(QueueFullError, match="'c' is refused: 2 requests wait already and max_queue is 2"):
        queue.add(request("c", 2))
    assert "c" not in queue
    queue.put_back(request("d", 3))
    with pytest.raises(QueueFullError, match="3 requests wait already and max_queue is 2"):
        queue.add(request("e", 4))
    queue.remove("a")
    queue.remove("b")
    queue.add(request("e", 4))
    assert drain(queue) == ["d", "e"]


def test_remove_takes_a_request_out_of_the_middle_once():
    queue = WaitingQueue(10)
    for sequence, name in enumerate("abc"):
        queue.add(request(name, sequence))
    assert queue.remove("b").request_id == "b"
    assert queue.remove("b") is None
    assert drain(queue) == ["a", "c"]


def test_an_id_used_again_after_removal_stands_at_its_new_place():
    queue = WaitingQueue(10)
    queue.add(request("a", 0))
    queue.remove("a")
    queue.add(request("b", 1))
    queue.add(request("a", 2))
    assert drain(queue) == ["b", "a"]


def test_removed_requests_do_not_pile_up():
    queue = WaitingQueue(10_000)
    queue.add(request("stays", 0))
    for sequence in range(1, 5_000):
        queue.add(request(str(sequence), sequence))
        queue.remove(str(sequence))
    assert len(queue._heap) < 100
    assert drain(queue) == ["stays"]


def test_random_operations_agree_with_a_sorted_list():
    choice, queue, waiting, sequence = random.Random(0), WaitingQueue(50), {}, 0
    for _ in range(5_000):
        operation = choice.random()
        if operation < 0.5 and len(waiting) < 50:
            entry = request(f"r{sequence}", sequence, choice.randint(-2, 2))
            queue.add(entry)
            waiting[entry.request_id] = entry
            sequence += 1
        elif operation < 0.7 and waiting:
            name = choice.choice(list(waiting))
            assert queue.remove(name) is waiting.pop(name)
        elif waiting:
            best = min(waiting.values(), key=lambda entry: (entry.priority, entry.sequence))
            assert queue.first() is best
            if choice.random() < 0.5:
                assert queue.take_first() is waiting.pop(best.request_id)
        assert len(queue) == len(waiting)
