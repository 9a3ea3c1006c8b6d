import math

import pytest

from deepinfer.errors import RequestError
from deepinfer.sampling.params import SamplingParams, declared


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True; it must be a whole number"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be between 0.0 and 100.0"),
        ({"temperature": math.nan}, "temperature is nan; it must be finite"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number"),
        ({"top_k": -2}, "top_k is -2; it must be between -1 and 2147483647"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0"),
        ({"top_p": math.inf}, "top_p is inf; it must be finite"),
        ({"min_p": 1.5}, "min_p is 1.5; it must be between 0.0 and 1.0"),
        ({"seed": -1}, f"seed is -1; it must be between 0 and {2**63 - 1}"),
        ({"seed": 2**63}, f"seed is {2**63}; it must be between 0 and {2**63 - 1}"),
        ({"stop": [""]}, "stop holds ''; each must be a text of 1 to 256 characters"),
        ({"stop": [3]}, "stop holds 3; each must be a text of 1 to 256 characters"),
        ({"stop": ["a"] * 17}, "stop has 17 texts; at most 16 are taken"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1; each must be a token id of 0 or more"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
    ],
)
def test_a_bad_value_is_refused_by_name_value_and_rule(values, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


def test_stop_texts_are_kept_once_and_one_text_is_a_list_of_one():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")


def test_seq_seed_is_another_name_of_seed():
    assert SamplingParams.from_mapping({"seq_seed": 4}).seed == 4
    with pytest.raises(RequestError, match="two names of one parameter"):
        SamplingParams.from_mapping({"seq_seed": 4, "seed": 5})


def test_unknown_names_are_refused():
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'top_q'; known are max_tokens, temperature"):
        SamplingParams.from_mapping({"top_q": 1})


def test_every_parameter_has_help():
    assert all(spec.metadata["help"] for spec in declared())
