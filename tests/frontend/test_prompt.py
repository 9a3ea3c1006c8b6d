from dataclasses import replace

import numpy as np
import pytest

from deepinfer.errors import RequestError
from deepinfer.frontend.prompt import RequestBuilder
from deepinfer.frontend.tokenizer import NoTokenizer
from deepinfer.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def builder(tokenizer) -> RequestBuilder:
    return RequestBuilder(tokenizer, vocab_size=4096, max_model_len=100)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4, 5],
        (3, 4, 5),
        np.array([3, 4, 5]),
        np.array([3, 4, 5], np.uint16),
        [np.int64(3), 4, np.uint8(5)],
        {"prompt_token_ids": [3, 4, 5]},
        iter([3, 4, 5]),
    ],
)
def test_token_ids_come_in_many_forms(builder, prompt):
    request = builder.build(prompt, request_id="r")
    assert request.token_ids.tolist() == [3, 4, 5]
    assert request.token_ids.dtype == np.int32


def test_a_text_is_encoded_and_special_spellings_in_it_count(builder, tokenizer):
    expected = tokenizer.encode("<｜User｜>hi")
    assert expected[0] == 4072
    assert builder.build("<｜User｜>hi", request_id="r").token_ids.tolist() == expected
    assert builder.build({"prompt": "<｜User｜>hi"}, request_id="r").token_ids.tolist() == expected


def test_open_parameters_are_filled_in(builder):
    request = builder.build([3] * 40, request_id="r", priority=-2, wants_prompt_logits=True)
    assert request.params.max_tokens == 60
    assert 0 <= request.params.seed < 2**63
    assert (request.request_id, request.priority, request.wants_prompt_logits) == ("r", -2, True)
    assert builder.build([3], request_id="r").params.seed != request.params.seed


def test_given_parameters_are_kept(builder):
    params = SamplingParams(max_tokens=7, seed=5, temperature=0.5, stop="x")
    assert builder.build([3], params, request_id="r").params == params


def test_prompt_and_answer_may_fill_the_context_exactly(builder):
    assert builder.build([3] * 99, SamplingParams(max_tokens=1), request_id="r").params.max_tokens == 1
    assert builder.build([3] * 40, SamplingParams(max_tokens=60), request_id="r").params.max_tokens == 60


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty; give at least one token"),
        ("", "prompt is empty; give at least one token"),
        (np.array([], np.int32), "prompt is empty"),
        ([3, -1], "prompt holds token id -1; ids of this model are 0 to 4095"),
        ([3, 4096], "prompt holds token id 4096; ids of this model are 0 to 4095"),
        ([3, 2**70], f"prompt holds token id {2**70}; ids of this model are 0 to 4095"),
        ([3, True], "prompt holds True among its token ids; each must be a whole number"),
        ([3, np.bool_(True)], "among its token ids; each must be a whole number"),
        ([3, 4.0], "prompt holds 4.0 among its token ids; each must be a whole number"),
        (np.array([3.0]), "among its token ids; each must be a whole number"),
        ([[3]], "prompt holds [3] among its token ids; each must be a whole number"),
        (["a"], "prompt holds 'a' among its token ids; each must be a whole number"),
        (None, "prompt is None; it must be a text, a list of token ids"),
        (3, "prompt is 3; it must be a text, a list of token ids"),
        (b"ab", "prompt is b'ab'; it must be a text, a list of token ids"),
        ({}, "prompt has the keys none; it must have exactly one of prompt, prompt_token_ids"),
        ({"text": "a"}, "prompt has the keys 'text'; it must have exactly one of prompt, prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [3]}, "prompt has the keys 'prompt', 'prompt_token_ids'"),
        ({"prompt": [3]}, "prompt is [3]; it must be a text"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids is 'a'; it must be a list of token ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids is None; it must be a list of token ids"),
        (
            [3] * 100,
            "prompt has 100 tokens but must have at most 99, so that one token fits behind it in max_model_len (100); "
            "shorten it or raise --max-model-len",
        ),
    ],
)
def test_a_bad_prompt_is_refused_by_name_value_and_rule(builder, prompt, message):
    with pytest.raises(RequestError) as caught:
        builder.build(prompt, request_id="r")
    assert message in str(caught.value)


def test_an_answer_that_does_not_fit_is_refused_with_true_numbers(builder):
    with pytest.raises(RequestError) as caught:
        builder.build([3] * 40, SamplingParams(max_tokens=61), request_id="r")
    assert str(caught.value) == (
        "max_tokens is 61 but prompt (40 tokens) + max_tokens must be <= 100; "
        "lower max_tokens to 60 or raise --max-model-len"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": {"top_k": 1}}, "params is a dict; it must be SamplingParams"),
        ({"params": SamplingParams(stop_token_ids=[4096])}, "stop_token_ids holds 4096; the vocabulary ends at 4095"),
        ({"priority": "high"}, "priority is 'high'; it must be a whole number"),
        ({"priority": True}, "priority is True; it must be a whole number"),
        ({"priority": 2**31}, f"priority is {2**31}; it must be a whole number"),
    ],
)
def test_bad_options_are_refused(builder, options, message):
    with pytest.raises(RequestError) as caught:
        builder.build([3], **{"request_id": "r", **options})
    assert message in str(caught.value)


def test_golden_tokens_limit_the_answer(builder):
    params = SamplingParams(golden_token_ids=[7, 8, 9])
    assert builder.build([3], params, request_id="r").params.max_tokens == 3
    assert builder.build([3], replace(params, max_tokens=2), request_id="r").params.max_tokens == 2
    assert builder.build([3], replace(params, max_tokens=50), request_id="r").params.max_tokens == 3
    with pytest.raises(RequestError, match="max_tokens is 200 but prompt"):
        builder.build([3], SamplingParams(golden_token_ids=[7] * 200), request_id="r")


def test_min_tokens_must_fit_into_the_answer(builder):
    with pytest.raises(RequestError, match=r"min_tokens is 98; it must be at most max_tokens \(97\)"):
        builder.build([3] * 3, SamplingParams(min_tokens=98), request_id="r")


@pytest.mark.parametrize("name", ["allowed_token_ids", "golden_token_ids", "stop_token_ids"])
def test_ids_beyond_the_vocabulary_are_refused(builder, name):
    with pytest.raises(RequestError, match=f"{name} holds 4096; the vocabulary ends at 4095"):
        builder.build([3], SamplingParams(**{name: [4096]}), request_id="r")


def test_bad_words_become_token_sequences(builder, tokenizer):
    request = builder.build([3], SamplingParams(bad_words=["capital"]), request_id="r")
    assert [tokenizer.decode(list(ids)) for ids in request.bad_word_ids] == ["capital", " capital"]


def test_a_text_needs_a_tokenizer(builder):
    bare = replace(builder, tokenizer=NoTokenizer())
    assert bare.build([3], request_id="r").token_ids.tolist() == [3]
    with pytest.raises(RequestError, match="prompt is the text 'a', but this model has no tokenizer; give token ids"):
        bare.build("a", request_id="r")
