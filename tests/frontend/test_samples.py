import dataclasses

import numpy as np

from deepinfer.frontend.samples import sample_seed, split_samples
from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import MAX_SEED, SamplingParams


def test_samples_are_alike_but_for_id_seed_and_prompt_logprobs():
    params = SamplingParams(seed=7, max_tokens=3, n=3, top_k=5, prompt_logprobs=1)
    request = GenerateRequest("a", np.array([1, 2], np.int32), params, 1.0, priority=4)
    first, *rest = split_samples(request, ["a", "b", "c"])
    assert first is request
    assert [one.request_id for one in rest] == ["b", "c"]
    for index, one in enumerate(rest, start=1):
        changed = dataclasses.replace(params, seed=sample_seed(7, index), prompt_logprobs=None)
        assert one == dataclasses.replace(request, request_id=one.request_id, params=changed)


def test_seeds_of_samples_are_valid_all_different_and_those_of_no_neighbour():
    seeds = [sample_seed(seed, index) for seed in (0, 1, 2, MAX_SEED) for index in range(128)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed <= MAX_SEED for seed in seeds)
    assert [sample_seed(seed, 0) for seed in (0, 9)] == [0, 9]
