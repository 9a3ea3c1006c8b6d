"""Values of every sampling parameter that change an answer, alone and together."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams

NUM_TOKENS = 10
BASE: dict[str, Any] = {"max_tokens": NUM_TOKENS, "seed": 3, "temperature": 1.0}
# Those whose effect grows with what has been generated, or depends on where the answer is.
CHANGES = {
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "min_tokens",
}  # fmt: skip
# A few tokens come again and again, and all of the likeliest are looked at.
STUTTER = {"logit_bias": {9: 9.0, 12: 8.5, 99: 8.0}, "logprobs": 20, "logprobs_mode": "processed"}
GRAMMARS = ({"regex": "[a-z]{2,6}( [a-z]{1,5}){0,3}"}, {"json": {"type": "array", "items": {"enum": [1, "b"]}}})


def choices(vocab_size: int) -> dict[str, list[Any]]:
    """Values by parameter; token ids are below 640."""
    return {
        "max_tokens": [1, 7],
        "temperature": [0.0, 1e-6, 0.7, 2.0, 100.0],
        "top_k": [1, 20, vocab_size + 5],
        "top_p": [1e-9, 0.9],
        "min_p": [0.05, 1.0],
        "seed": [0, 2**63 - 1],
        "n": [3],
        "stop": [["e", " "]],
        "stop_token_ids": [list(range(40, 100))],
        "include_stop_str_in_output": [True],
        "ignore_eos": [True],
        "min_tokens": [6],
        "repetition_penalty": [0.5, 1.8],
        "presence_penalty": [1.5],
        "frequency_penalty": [-0.8, 2.0],
        "logit_bias": [{7: 100.0}, {token: (-1.0) ** token * 100 for token in range(640)}],
        "allowed_token_ids": [list(range(0, 640, 3)), [5]],
        "bad_words": [["a", "e", "the"]],
        "golden_token_ids": [[9, 8, 7, 6, 5, 4]],
        "logprobs": [3, 20],
        "logprobs_mode": ["processed"],
        "prompt_logprobs": [2],
        "structured_outputs": list(GRAMMARS),
        "so_args": [
            {"schema_type": "regex", "schema": "[0-9]{2,4}"},
            {"schema_type": "choice", "schema": ["yes", "no"], "trigger_token_ids": [9, 12], "bound_token_id": 9},
        ],
    }


def cases(values: dict[str, list[Any]], num_mixed: int) -> list[SamplingParams]:
    """Every value alone, those of `CHANGES` also with `STUTTER`, then up to six parameters together."""
    alone = [{name: value} for name, some in values.items() for value in some]
    alone += [{**STUTTER, **value} for value in alone if set(value) & CHANGES]
    draw = np.random.default_rng(6)
    found = [_params(value, int(draw.integers(4, 12))) for value in alone]  # other lengths, so that batches change
    while len(found) < len(alone) + num_mixed:
        names = draw.choice(list(values), draw.integers(2, 7), replace=False)
        mixed = {name: values[name][draw.integers(len(values[name]))] for name in names}
        try:
            found.append(_params(mixed, int(draw.integers(4, 12))))
        except RequestError:  # parameters that are refused beside each other
            continue
    return found


def _params(values: dict[str, Any], max_tokens: int) -> SamplingParams:
    return SamplingParams(**{**BASE, "max_tokens": max(max_tokens, values.get("min_tokens", 0)), **values})
