"""Several answers to one prompt: a request for each, alike but for the seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import MAX_SEED

BITS = 2**64 - 1


def split_samples(request: GenerateRequest, request_ids: Sequence[str]) -> list[GenerateRequest]:
    """The request itself, then one for each further id; prompt log-probabilities come with the first only."""
    seed = request.params.seed
    assert seed is not None and request_ids[0] == request.request_id, "a request as the builder makes it"
    rest = [
        dataclasses.replace(
            request,
            request_id=request_id,
            params=dataclasses.replace(request.params, seed=sample_seed(seed, index), prompt_logprobs=None),
        )
        for index, request_id in enumerate(request_ids[1:], start=1)
    ]
    return [request, *rest]


def sample_seed(seed: int, index: int) -> int:
    """The seed of an answer: the caller's for the first, else one that no neighbouring seed shares.

    SplitMix64's step and finaliser (Steele, Lea and Flood, OOPSLA 2014), one bit dropped.
    """
    if index == 0:
        return seed
    x = (seed * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15) & BITS
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return (x ^ (x >> 31)) & MAX_SEED
