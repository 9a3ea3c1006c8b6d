import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.frontend.outputs import OutputDelta, RequestOutput, TokenLogprobs
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer
from deepinfer.messages import Finished, GenerateRequest, Logprobs, RequestTimes, StepOutput
from deepinfer.sampling.params import SamplingParams

TIMES = RequestTimes(arrival=100.0, scheduled=100.5, first_token=102.0, finished=105.0)


def stream_for(tokenizer, **params) -> RequestStream:
    request = GenerateRequest("r", np.array([5, 6, 7], np.int32), SamplingParams(seed=0, **params), arrival=100.0)
    return RequestStream(request, tokenizer)


def finished(reason="length", **more) -> Finished:
    return Finished("r", reason, TIMES, **more)


def run(stream: RequestStream, ids: list[int], end: Finished) -> list[OutputDelta]:
    """Feed ids as the engine does, until the stream wants to stop; collect the deltas."""
    deltas = []
    for token_id in ids:
        stream.add(token_id)
        deltas.append(stream.take())
        if stream.wants_stop:
            break
    stream.finish(end)
    deltas.append(stream.take())
    assert stream.take() is None
    return [delta for delta in deltas if delta is not None]


def joined(deltas: list[OutputDelta]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [i for delta in deltas for i in delta.token_ids]


def test_tokens_become_text_counts_and_times(tokenizer):
    stream, ids = stream_for(tokenizer), tokenizer.encode("Hello there")
    deltas = run(stream, ids, finished(num_cached_tokens=2))
    assert joined(deltas) == ("Hello there", ids)
    assert [delta.finish_reason for delta in deltas] == [None] * len(ids) + ["length"]
    output = stream.output()
    assert output == RequestOutput(
        request_id="r",
        prompt_token_ids=[5, 6, 7],
        text="Hello there",
        token_ids=ids,
        finish_reason="length",
        num_cached_tokens=2,
        num_generated_tokens=len(ids),
        queue_seconds=0.5,
        first_token_seconds=2.0,
        total_seconds=5.0,
    )
    assert output.num_prompt_tokens == 3


def test_the_end_token_is_kept_without_its_text(tokenizer):
    ids = [*tokenizer.encode("yes"), 1]
    stream = stream_for(tokenizer)
    run(stream, ids, finished("stop", stop_token=1))
    output = stream.output()
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == ("yes", ids, "stop", 1)


def test_an_ordinary_stop_token_gives_no_text_unless_it_is_only_eos_that_is_ignored(tokenizer):
    (comma,) = tokenizer.encode(",")
    stream = stream_for(tokenizer, stop_token_ids=[comma])
    run(stream, [*tokenizer.encode("a"), comma], finished("stop", stop_token=comma))
    assert stream.output().text == "a"
    stream = stream_for(tokenizer, ignore_eos=True)
    run(stream, [*tokenizer.encode("a"), 1, comma], finished())
    assert stream.output().text == "a,"


def test_a_stop_string_ends_the_answer_and_cuts_text_and_ids(tokenizer):
    ids = tokenizer.encode("one two STOP three")
    stream = stream_for(tokenizer, stop=["STOP"])
    deltas = run(stream, ids, finished("abort"))
    output = stream.output()
    assert output.text == "one two "
    assert (output.finish_reason, output.stop_reason, output.error) == ("stop", "STOP", None)
    assert joined(deltas) == (output.text, output.token_ids)
    assert tokenizer.decode(output.token_ids).startswith("one two ")
    assert len(output.token_ids) < output.num_generated_tokens <= len(ids)


def test_a_token_across_the_cut_stays(tokenizer):
    token_id = next(i for i in range(3, 4072) if len(tokenizer.decode([i])) >= 4)
    text = tokenizer.decode([token_id])
    stream = stream_for(tokenizer, stop=[text[2:]])
    run(stream, [token_id], finished("abort"))
    assert (stream.output().text, stream.output().token_ids) == (text[:2], [token_id])
    stream = stream_for(tokenizer, stop=[text])
    run(stream, [token_id], finished("abort"))
    assert (stream.output().text, stream.output().token_ids) == ("", [])


def test_what_ended_the_answer_stays_when_it_is_asked_for(tokenizer):
    stream = stream_for(tokenizer, stop=["STOP"], include_stop_str_in_output=True)
    deltas = run(stream, tokenizer.encode("one STOP three"), finished("abort"))
    assert joined(deltas) == (stream.output().text, stream.output().token_ids)
    assert (stream.output().text, stream.output().stop_reason) == ("one STOP", "STOP")
    assert tokenizer.decode(stream.output().token_ids).startswith("one STOP")
    (comma,) = tokenizer.encode(",")
    stream = stream_for(tokenizer, stop_token_ids=[comma], include_stop_str_in_output=True)
    run(stream, [*tokenizer.encode("a"), comma], finished("stop", stop_token=comma))
    assert stream.output().text == "a,"


def test_tokens_of_thinking_are_counted_once(tokenizer):
    """However often a writer asks, and whether the end of thinking has come or not."""

    class Watched(list):
        num_reads = 0

        def __getitem__(self, place):
            self.num_reads += 1
            return super().__getitem__(place)

        def __contains__(self, token):
            self.num_reads += len(self)
            return super().__contains__(token)

    stream = stream_for(tokenizer, max_tokens=300)
    tokens = stream._token_ids = Watched()
    counts = []
    for token in [7] * 100 + [9] + [7] * 100:
        stream.add(token)
        counts.append(stream.num_tokens_before(9))
    assert counts == list(range(1, 101)) + [100] * 101 and stream.num_tokens_before(7) == 0
    assert tokens.num_reads < 400


def test_a_stop_string_within_the_first_min_tokens_does_not_count(tokenizer):
    ids = [tokenizer.encode(letter)[0] for letter in "abcabc"]
    for min_tokens, text in ((0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabc")):
        stream = stream_for(tokenizer, stop=["bc"], min_tokens=min_tokens)
        run(stream, ids, finished())
        assert stream.output().text == text, f"min_tokens {min_tokens}"
        assert stream.output().stop_reason == ("bc" if min_tokens < 6 else None)


def test_prompt_logprobs_come_with_the_first_delta_and_the_output(tokenizer):
    def lines(*ids):
        count = len(ids)
        top = np.array([[one, 0] for one in ids], np.int32)
        values = np.array([[-1.0, -np.inf]] * count, np.float32)
        return Logprobs(-np.array(ids, np.float32), np.arange(count, dtype=np.int32) + 1, top, values)

    stream = stream_for(tokenizer, prompt_logprobs=2)
    stream.add_prompt_lines(1, lines(6))
    stream.add_prompt_lines(2, lines(7))
    stream.add(8)
    expected = [None, TokenLogprobs(6, -6.0, 1, [(6, -1.0)]), TokenLogprobs(7, -7.0, 1, [(7, -1.0)])]
    assert stream.take().prompt_logprobs == expected
    stream.add(9)
    stream.finish(finished())
    assert stream.take().prompt_logprobs is None
    assert stream.output().prompt_logprobs == expected


def test_answers_to_one_prompt_carry_its_id_and_their_number(tokenizer):
    request = GenerateRequest("own", np.array([5], np.int32), SamplingParams(seed=0), arrival=0.0)
    stream = RequestStream(request, tokenizer, sample=2, asked_as="asked")
    stream.finish(finished())
    delta, output = stream.take(), stream.output()
    assert (delta.request_id, delta.sample, output.request_id) == ("asked", 2, "asked")


def test_tokens_after_the_stop_string_are_dropped(tokenizer):
    stream = stream_for(tokenizer, stop=["b"])
    for token_id in tokenizer.encode("a b"):
        stream.add(token_id)
    assert stream.wants_stop
    num_generated = len(tokenizer.encode("a b"))
    for token_id in tokenizer.encode(" and more"):
        stream.add(token_id)
    stream.finish(finished("error", error="too late to matter"))
    assert not stream.wants_stop
    stream.finish(finished("abort"))
    output = stream.output()
    assert (output.text, output.finish_reason, output.error) == ("a ", "stop", None)
    assert output.num_generated_tokens == num_generated


def test_a_held_back_beginning_comes_out_at_the_end(tokenizer):
    stream = stream_for(tokenizer, stop=["stopping"])
    ids = tokenizer.encode("do not stop")
    deltas = run(stream, ids, finished("length"))
    assert joined(deltas) == ("do not stop", ids)
    assert deltas[-1].text.endswith("stop") and deltas[-1].finish_reason == "length"


def test_an_incomplete_character_is_replaced_at_the_end(tokenizer):
    ids = tokenizer.encode("😀")[:-1]
    stream = stream_for(tokenizer)
    run(stream, ids, finished("length"))
    assert stream.output().text == "\ufffd" == tokenizer.decode(ids)


def test_logprobs_follow_the_ids(tokenizer):
    ids = tokenizer.encode("x END")
    stream = stream_for(tokenizer, stop=["END"], logprobs=1)
    logprobs = Logprobs(
        values=np.array([-9.0, -0.5], np.float32),
        ranks=np.array([9, 2], np.int32),
        top_ids=np.array([[8, 9], [3, 4]], np.int32),
        top_values=np.array([[-1.0, -2.0], [-0.25, -3.0]], np.float32),
    )
    for token_id in ids:
        stream.add_line(StepOutput(["other", "r"], np.array([0, token_id], np.int32), logprobs), 1)
    stream.finish(finished("abort"))
    output = stream.output()
    assert 0 < len(output.token_ids) < len(ids)
    assert output.logprobs == [TokenLogprobs(i, -0.5, 2, [(3, -0.25)]) for i in output.token_ids]
    assert stream.take().logprobs == output.logprobs


def test_an_error_keeps_what_was_written(tokenizer):
    stream = stream_for(tokenizer)
    deltas = run(stream, tokenizer.encode("part"), finished("error", error="logits were not finite"))
    assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "logits were not finite")
    assert (stream.output().text, stream.output().error) == ("part", "logits were not finite")


def test_a_request_that_never_ran_has_no_times(tokenizer):
    stream = stream_for(tokenizer)
    stream.finish(Finished("r", "abort", RequestTimes(100.0, None, None, 101.0)))
    output = stream.output()
    assert (output.queue_seconds, output.first_token_seconds, output.total_seconds) == (None, None, 1.0)
    assert (output.text, output.token_ids) == ("", [])


@settings(max_examples=200)
@given(
    ids=st.lists(st.one_of(st.integers(3, 259), st.sampled_from([0, 4072, 4095]), st.integers(260, 4071)), max_size=20),
    data=st.data(),
)
def test_deltas_and_output_agree_with_a_search_of_the_whole_text(tokenizer, ids, data):
    text = tokenizer.decode(ids)
    cut = data.draw(st.tuples(st.integers(0, len(text)), st.integers(1, 4)), label="stop")
    stops = [text[cut[0] : cut[0] + cut[1]] or "zzz", data.draw(st.text("ab ", min_size=1, max_size=3))]
    stream = stream_for(tokenizer, stop=stops, ignore_eos=True)
    deltas = run(stream, ids, finished("length"))
    output = stream.output()
    found = [text.find(stop) for stop in stops if stop in text]
    assert output.text == (text[: min(found)] if found else text)
    assert joined(deltas) == (output.text, output.token_ids)
    if found:
        assert output.finish_reason == "stop" and output.stop_reason in stops
        assert output.token_ids == ids[: len(output.token_ids)]
        assert tokenizer.decode(output.token_ids).startswith(output.text) or output.text.endswith("\ufffd")
        fewer = tokenizer.detokenizer()
        shorter = "".join(map(fewer.add, output.token_ids[:-1]))
        assert not output.token_ids or len(shorter) <= len(output.text)
    else:
        assert (output.token_ids, output.finish_reason) == (ids, "length")


def test_a_model_without_tokenizer_gives_ids_and_no_text():
    stream = stream_for(NoTokenizer())
    deltas = run(stream, [5, 1, 9], finished("length"))
    assert joined(deltas) == ("", [5, 1, 9])
    assert (stream.output().text, stream.output().token_ids) == ("", [5, 1, 9])


def test_outputs_turn_into_json():
    output = RequestOutput(
        request_id="r",
        prompt_token_ids=[1, 2],
        text="a",
        token_ids=[3],
        finish_reason="stop",
        logprobs=[TokenLogprobs(3, -0.5, 1, [(3, -0.5)])],
    )
    values = json.loads(json.dumps(output.as_dict()))
    assert values["num_prompt_tokens"] == 2
    assert values["logprobs"] == [{"token_id": 3, "logprob": -0.5, "rank": 1, "top": [[3, -0.5]]}]
    assert json.loads(json.dumps(OutputDelta(request_id="r", text="x").as_dict()))["text"] == "x"


def test_a_refused_request_has_an_output_too():
    output = RequestOutput.refused("r", "prompt is empty")
    assert (output.finish_reason, output.error, output.num_prompt_tokens) == ("error", "prompt is empty", 0)


def test_output_before_the_end_is_a_broken_invariant(tokenizer):
    with pytest.raises(AssertionError, match="r is not finished"):
        stream_for(tokenizer).output()
