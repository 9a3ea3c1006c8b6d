import dataclasses
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
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1; it must be between 0 and 20"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode is 'cooked'; it must be raw or processed"),
        ({"n": 0}, "n is 0; it must be between 1 and 128"),
        ({"n": 129}, "n is 129; it must be between 1 and 128"),
        ({"n": 2, "temperature": 0}, "n is 2 but temperature is 0: all answers would be one"),
        ({"n": None}, "n is None; it must be a whole number"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be between 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be at most max_tokens (4)"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be between 0.01 and 100.0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be between -2.0 and 2.0"),
        ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1; it must be between -2.0 and 2.0"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan; it must be finite"),
        ({"logit_bias": {3: 100.5}}, "logit_bias[3] is 100.5; it must be between -100 and 100"),
        ({"logit_bias": {3: "x"}}, "logit_bias[3] is 'x'; it must be a number"),
        ({"logit_bias": {-3: 1}}, "logit_bias holds -3; each must be a token id of 0 or more"),
        ({"logit_bias": {"a": 1}}, "logit_bias holds 'a'; each must be a token id of 0 or more"),
        ({"logit_bias": {"3": 1, 3: 1}}, "logit_bias holds token id 3 twice"),
        ({"logit_bias": [3]}, "logit_bias holds 3; each must be a token id with its bias"),
        ({"logit_bias": 3}, "logit_bias is 3; it must be a list"),
        ({"logit_bias": dict.fromkeys(range(2**14 + 1), 1)}, "logit_bias has 16385 ids; at most 16384 are taken"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty; give at least 1 id, or leave it out"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids holds True; each must be a token id"),
        ({"golden_token_ids": []}, "golden_token_ids is empty"),
        ({"bad_words": [""]}, "bad_words holds ''; each must be a text of 1 to 256 characters"),
        ({"bad_words": [str(n) for n in range(129)]}, "bad_words has 129 texts; at most 128 are taken"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output is 'yes'; it must be true or false"),
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


def test_logprobs_have_the_names_of_chat_requests_too():
    def number(**values):
        return SamplingParams.from_mapping(values).logprobs

    assert [number(logprobs=True), number(logprobs=True, top_logprobs=4), number(top_logprobs=2)] == [0, 4, 2]
    assert [number(logprobs=False), number(logprobs=3), number(logprobs=False, top_logprobs=None)] == [None, 3, None]
    with pytest.raises(RequestError, match="top_logprobs is set but logprobs is false"):
        number(logprobs=False, top_logprobs=1)
    with pytest.raises(RequestError, match="top_logprobs|logprobs is 21"):
        number(logprobs=True, top_logprobs=21)


def test_lists_are_stored_as_tuples_without_repeats_where_order_means_nothing():
    params = SamplingParams(logit_bias={"5": 1, 6: -2.5}, allowed_token_ids=[4, 4], golden_token_ids=[4, 4])
    assert params.logit_bias == ((5, 1.0), (6, -2.5)) and isinstance(params.logit_bias[0].bias, float)
    assert (params.allowed_token_ids, params.golden_token_ids) == ((4,), (4, 4))
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias
    assert hash(params) == hash(dataclasses.replace(params))


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "golden_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused_by_name(name):
    params = SamplingParams(**{name: {3: 1.0, 640: 1.0} if name == "logit_bias" else [3, 640]})
    params.check_ids(641)
    with pytest.raises(RequestError, match=f"{name} holds 640; the vocabulary ends at 639"):
        params.check_ids(640)


def test_trigger_ids_outside_the_vocabulary_are_refused():
    args = {"schema_type": "regex", "schema": "a", "trigger_token_ids": [3, 640], "bound_token_id": 3}
    params = SamplingParams(so_args=args)
    params.check_ids(641)
    with pytest.raises(RequestError, match="so_args holds 640; the vocabulary ends at 639"):
        params.check_ids(640)


def test_unknown_names_are_refused():
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'top_q'; known are max_tokens, temperature"):
        SamplingParams.from_mapping({"top_q": 1})


def test_every_parameter_has_help():
    assert all(spec.metadata["help"] for spec in declared())
