import numpy as np
import pytest

from deepinfer.sampling.params import SamplingParams
from deepinfer.scheduler.request import Request


def request(num_prompt=3, generated=(), **fields):
    values = dict(priority=0, arrival=0.0, sequence=0, decoder_start=0, wants_prompt_logits=False) | fields
    prompt = np.arange(10, 10 + num_prompt, dtype=np.int32)
    return Request("a", prompt, SamplingParams(max_tokens=5), generated=list(generated), **values)


def test_limit_leaves_out_the_last_token():
    assert request(3).limit == 7


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, 3, [10, 11, 12]), (1, 2, [11]), (0, 5, [10, 11, 12, 1, 2]), (2, 4, [12, 1]), (3, 5, [1, 2]), (4, 5, [2])],
)
def test_tokens_reach_from_the_prompt_into_the_answer(start, end, expected):
    tokens = request(3, generated=[1, 2, 3]).tokens(start, end)
    assert tokens.tolist() == expected
    assert tokens.dtype == np.int32


def test_times_hold_what_happened_and_none_for_what_did_not():
    times = request(arrival=1.0, scheduled=2.0).times(5.0)
    assert (times.arrival, times.scheduled, times.first_token, times.finished) == (1.0, 2.0, None, 5.0)
