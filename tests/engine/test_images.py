"""Prompts with images: the oracle's golden case, however it is cut, batched, preempted or repeated."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import v41_oracle
from safetensors.torch import load_file

import goldens
from deepinfer import LLM, EngineDeadError, RequestError, SamplingParams
from deepinfer.cli.eval import NANO_EVAL
from image_prompts import TOKEN, prompts
from images.pictures import picture
from waiting import PATIENCE

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FLOAT32 = {"precision": "float32", "max_num_requests": 8}
NATIVE = {"precision": "fast", "batch_invariant": True, "device": "cpu"}


@dataclass(frozen=True)
class Case:
    """The golden image case. tokens: with the span spelled out. prompt: with one placeholder, and the image."""

    tokens: list[int]
    greedy: list[int]
    steady: int
    prompt: dict[str, Any]


@pytest.fixture(scope="module")
def case() -> Case:
    known = json.loads((goldens.ROOT / "goldens" / "goldens.json").read_text())["image"]
    start, count = known["span_start"], len(known["span_types"])
    ids = [*known["tokens"][: start + 1], *known["tokens"][start + count :]]
    prompt = {"prompt_token_ids": ids, "images": [goldens.ROOT / "goldens" / "image.png"]}
    return Case(known["tokens"], known["greedy"], known["steady"], prompt)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(goldens.CHECKPOINT, **FLOAT32) as llm:
        yield llm


def golden_logits(precision: str) -> np.ndarray:
    return load_file(goldens.ROOT / "goldens" / "image.safetensors")[f"logits.{precision}"].float().numpy()


def answers(llm: LLM, asked: list[dict[str, Any]], params: SamplingParams = SHORT) -> list[list[int]]:
    outputs = llm.generate(asked, params)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[int]]:
    return [answers(llm, [prompt])[0] for prompt in prompts(6)]


def test_float32_logits_and_greedy_text_are_the_golden_ones(llm: LLM, case: Case) -> None:
    difference = goldens.relative_difference(llm.score(case.prompt), golden_logits("float32"))
    assert np.median(difference) <= 1e-6 and difference.max() <= 1e-2
    (output,) = llm.generate(case.prompt, GREEDY)
    assert output.prompt_token_ids == case.tokens
    assert output.token_ids[: case.steady] == case.greedy[: case.steady]


def test_exact_logits_and_greedy_text_are_the_golden_ones(case: Case) -> None:
    with LLM(goldens.CHECKPOINT, precision="exact") as llm:
        difference = goldens.relative_difference(llm.score(case.prompt), golden_logits("exact"))
        assert np.median(difference) == 0.0 and difference.max() <= 1e-2
        assert llm.generate(case.prompt, GREEDY)[0].token_ids == case.greedy


def test_several_images_are_what_the_oracle_computes(llm: LLM) -> None:
    oracle = v41_oracle.Oracle(goldens.CHECKPOINT, "float32")
    for prompt in prompts(3):
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        tokens, spans, at = output.prompt_token_ids, [], 0
        for image in prompt["images"]:
            patches = v41_oracle.image_patches(image, oracle.config.vision)
            spans.append(v41_oracle.ImageSpan(tokens.index(TOKEN, at), *patches))
            at = spans[-1].start + len(spans[-1].types(3))
        difference = goldens.relative_difference(llm.score(prompt), oracle.forward(tokens, spans).logits.numpy())
        assert np.median(difference) <= 1e-6 and difference.max() <= 4e-2


@pytest.mark.parametrize("size", [2, 3, 6])
def test_batches_equal_each_request_alone(llm: LLM, alone: list[list[int]], size: int) -> None:
    assert answers(llm, prompts(6)[:size]) == alone[:size]


@pytest.mark.parametrize("chunk", [1, 3, 7, 16])
def test_chunked_prompts_equal_whole_ones(alone: list[list[int]], case: Case, chunk: int) -> None:
    with LLM(goldens.CHECKPOINT, max_chunk_tokens=chunk, **FLOAT32) as llm:
        assert answers(llm, prompts(6)[:3]) == alone[:3]
        difference = goldens.relative_difference(llm.score(case.prompt), golden_logits("float32"))
    assert np.median(difference) <= 1e-6 and difference.max() <= 1e-2


@pytest.mark.parametrize("is_async", [False, True])
def test_preemption_in_a_tiny_pool_and_cache_changes_nothing(is_async: bool) -> None:
    text = goldens.prompt(200).tokens
    asked = [  # each answer grows into a second block
        {"prompt_token_ids": [*text[: 100 + n], TOKEN], "images": [picture(90 + n, 70, seed=n)]} for n in range(7)
    ]
    options = {"async_scheduling": is_async, "max_num_requests": 7, **NATIVE}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(goldens.CHECKPOINT, num_blocks=64, **options) as roomy:
        expected = [answers(roomy, [prompt], params)[0] for prompt in asked]
    with LLM(goldens.CHECKPOINT, num_blocks=9, image_cache_bytes=3 * 14 * 128 * 4, **options) as llm:
        assert answers(llm, asked, params) == expected
        assert llm.stats().num_preemptions > 0


def test_native_ops_answer_alike_alone_in_batches_and_in_chunks(case: Case) -> None:
    with LLM(goldens.CHECKPOINT, **NATIVE) as llm:
        expected = [answers(llm, [prompt])[0] for prompt in prompts(6)]
        assert answers(llm, prompts(6)) == expected
        assert llm.generate(case.prompt, GREEDY)[0].token_ids[: case.steady] == case.greedy[: case.steady]
        whole = llm.score(case.prompt)
    with LLM(goldens.CHECKPOINT, max_chunk_tokens=5, **NATIVE) as llm:
        assert answers(llm, prompts(6)) == expected
        assert np.array_equal(llm.score(case.prompt), whole)


def test_bounded_replay_and_prompt_logprobs_take_images(case: Case) -> None:
    with LLM(goldens.CHECKPOINT, decoder_replay="bounded", replay_keep_tokens=24, **FLOAT32) as llm:
        assert answers(llm, prompts(4)) != []
    with LLM(goldens.CHECKPOINT, max_chunk_tokens=9, **FLOAT32) as llm:
        (output,) = llm.generate(case.prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    logits = golden_logits("float32").astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for position, line in enumerate(output.prompt_logprobs[1:], 1):
        assert line.logprob == pytest.approx(logprobs[position - 1, case.tokens[position]], abs=1e-3)


def test_the_same_image_twice_is_encoded_once(llm: LLM) -> None:
    before = llm.stats().num_encoded_images
    image = picture(200, 150, seed=77)
    asked = {"prompt_token_ids": [0, TOKEN, 5, TOKEN, 6], "images": [image, image]}
    first = answers(llm, [asked, asked])
    assert llm.stats().num_encoded_images == before + 1
    assert answers(llm, [asked]) == first[:1]
    assert llm.stats().num_encoded_images == before + 1


def test_two_images_of_one_size_do_not_share_an_answer_s_logits(llm: LLM) -> None:
    ids = [0, 9, TOKEN, 11, 12]
    one, other = (llm.score({"prompt_token_ids": ids, "images": [picture(120, 90, seed=n)]}) for n in (1, 2))
    assert one.shape == other.shape
    same = (one == other).all(axis=1)
    assert same[:2].all() and not same[3:].any()  # the start of an image is the same vector for all


def test_embeddings_stay_within_their_bytes(case: Case) -> None:
    limit = 23 * 128 * 4  # one large image, or two small ones
    with LLM(goldens.CHECKPOINT, image_cache_bytes=limit, max_encode_patches=30, **NATIVE) as llm:
        asked = [prompt for prompt in prompts(6) if len(prompt["images"]) == 1]
        many = answers(llm, asked * 3)
        assert many == many[: len(asked)] * 3
        encoder = llm._client.core._encoder._executor
        assert 0 < encoder.num_bytes <= limit
        with pytest.raises(RequestError, match=r"the embeddings of its images take \d+ bytes, but there is room for"):
            llm.generate(prompts(3)[2], SHORT)


def test_a_refused_image_fails_its_prompt_alone(llm: LLM, alone: list[list[int]]) -> None:
    good = prompts(6)[0]
    bad = {"prompt_token_ids": [0, TOKEN], "images": [b"junk"]}
    outputs = llm.generate([good, bad, good], SHORT)
    assert [output.token_ids for output in (outputs[0], outputs[2])] == [alone[0]] * 2
    assert outputs[1].finish_reason == "error" and outputs[1].error.startswith("images[0] is no image")


def test_an_image_larger_than_a_step_is_refused() -> None:
    with LLM(goldens.CHECKPOINT, max_step_tokens=16, max_num_requests=4, precision="float32") as llm:
        with pytest.raises(
            RequestError, match=r"an image of \d+ tokens, computed in one step, but a step has room for 13"
        ):
            llm.generate({"prompt_token_ids": [0, TOKEN], "images": [picture(130, 90)]}, SHORT)
        assert len(answers(llm, [{"prompt_token_ids": [0, 5]}])[0]) == 8


def test_queued_pixels_are_bounded_and_the_rest_waits_its_turn(alone: list[list[int]]) -> None:
    with LLM(goldens.CHECKPOINT, image_queue_bytes=400_000, **FLOAT32) as llm:
        assert answers(llm, prompts(6)) == alone
        with pytest.raises(RequestError, match=r"the pixels of its images take \d+ bytes, but image_queue_bytes is"):
            llm.generate({"prompt_token_ids": [TOKEN] * 9, "images": [picture(210, 210, seed=n) for n in range(9)]})


def test_multi_modal_data_stands_beside_prompts(llm: LLM, case: Case) -> None:
    data = {"image_bytes": [(goldens.ROOT / "goldens" / "image.png").read_bytes()], "image_sizes": [(130, 90)]}
    ids = case.prompt["prompt_token_ids"]
    (expected,) = llm.generate(case.prompt, SHORT)
    assert llm.generate(ids, SHORT, multi_modal_data=data)[0].token_ids == expected.token_ids
    outputs = llm.generate([ids, [0, 5], {"prompt_token_ids": ids}], SHORT, multi_modal_data=[data, None, data])
    assert [outputs[0].token_ids, outputs[2].token_ids] == [expected.token_ids] * 2
    with pytest.raises(RequestError, match="multi_modal_data is a list of 1; it must be one for each of 2 prompts"):
        llm.generate([ids, ids], SHORT, multi_modal_data=[data])


def test_decoding_goes_on_while_an_image_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder is held; a running request gets all its tokens, and the image's request gets its own after it."""
    with LLM(goldens.CHECKPOINT, **FLOAT32) as llm:
        encoder = llm._client.core._encoder._executor
        gate, began, encode = threading.Event(), threading.Event(), encoder.execute

        def held(plan: object) -> object:
            began.set()
            assert gate.wait(PATIENCE)
            return encode(plan)

        monkeypatch.setattr(encoder, "execute", held)
        waiting = llm.stream({"prompt_token_ids": [0, TOKEN], "images": [picture(99, 80)]}, SHORT)
        pieces: list[Any] = []
        reader = threading.Thread(target=lambda: pieces.extend(waiting))
        reader.start()
        assert began.wait(PATIENCE)
        assert len(answers(llm, [{"prompt_token_ids": [0, 5, 6]}], GREEDY)[0]) == 24
        assert pieces == [] and llm.stats().num_waiting == 1
        gate.set()
        reader.join()
        assert sum(len(piece.token_ids) for piece in pieces) == 8


def test_a_request_can_be_aborted_while_its_image_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(goldens.CHECKPOINT, **FLOAT32) as llm:
        encoder = llm._client.core._encoder._executor
        gate, began, encode = threading.Event(), threading.Event(), encoder.execute

        def held(plan: object) -> object:
            began.set()
            assert gate.wait(PATIENCE)
            return encode(plan)

        monkeypatch.setattr(encoder, "execute", held)
        prompt = {"prompt_token_ids": [0, TOKEN], "images": [picture(99, 81)]}
        ends: list[Any] = []
        reader = threading.Thread(target=lambda: ends.extend(llm.stream(prompt, SHORT, request_id="gone")))
        reader.start()
        assert began.wait(PATIENCE) and llm.abort("gone")
        reader.join()
        assert [piece.finish_reason for piece in ends] == ["abort"]
        gate.set()
        assert len(answers(llm, [prompt])[0]) == 8  # the embedding that nobody waited for is used


def test_many_requests_and_aborts_at_once_leave_nothing_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of embeddings that holds the images of two requests, an encoder that takes one or two at a time."""
    asked, long = prompts(24), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    params = [long] * 12 + [SHORT] * 12  # the long ones are aborted at random
    with LLM(goldens.CHECKPOINT, image_cache_bytes=60 * 128 * 4, max_encode_patches=100, **NATIVE) as llm:
        expected = [output.token_ids for output in llm.generate(asked, params)]
        found: list[list[int]] = [[] for _ in asked]
        reasons: list[Any] = [None] * len(asked)

        def read(number: int) -> None:
            for piece in llm.stream(asked[number], params[number], request_id=f"r{number}"):
                found[number] += piece.token_ids
                reasons[number] = piece.finish_reason

        encoder, aborted = llm._client.core._encoder._executor, threading.Event()
        encode = encoder.execute

        def after_an_abort(plan: object) -> object:
            assert aborted.wait(PATIENCE)
            return encode(plan)

        monkeypatch.setattr(encoder, "execute", after_an_abort)
        readers = [threading.Thread(target=read, args=(number,)) for number in range(len(asked))]
        for reader in readers:
            reader.start()
        draw = np.random.default_rng(3)
        while any(reader.is_alive() for reader in readers):
            if llm.abort(f"r{draw.integers(0, 12)}"):
                aborted.set()
            time.sleep(0.005)
        assert set(reasons[:12]) <= {"abort", "length"} and "abort" in reasons
        assert reasons[12:] == ["length"] * 12 and found[12:] == expected[12:]
        assert all(tokens == whole[: len(tokens)] for tokens, whole in zip(found, expected, strict=True))
        core = llm._client.core
        core.scheduler.check()
        assert core.scheduler._images.num_waiting == core.scheduler._images._pixels.num_bytes == 0
        assert answers(llm, asked[-3:]) == expected[-3:]


def test_fifty_images_in_one_prompt(alone: list[list[int]]) -> None:
    """Seven different ones; whole, in pieces, and beside others it has the same answer."""
    text, images = goldens.prompt(200).tokens, [picture(40 + number % 7, 60, seed=number % 7) for number in range(50)]
    ids = [0, *(token for number in range(50) for token in (TOKEN, text[number])), *text[:5]]
    found = []
    for chunk in (None, 64):
        with LLM(goldens.CHECKPOINT, max_chunk_tokens=chunk, **FLOAT32) as llm:
            asked = {"prompt_token_ids": ids, "images": images}
            found += [answers(llm, [asked])[0], answers(llm, [*prompts(2), asked])[2]]
            assert llm.stats().num_encoded_images == 7 + 3
    assert len(found[0]) == 8 and found == [found[0]] * 4


def test_an_encoder_that_fails_stops_the_engine_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(goldens.CHECKPOINT, **FLOAT32) as llm:
        encoder = llm._client.core._encoder._executor
        monkeypatch.setattr(encoder, "_encode", lambda image: 1 / 0)
        with pytest.raises(EngineDeadError, match="division by zero"):
            answers(llm, prompts(1))


def test_images_of_the_null_device_are_counted_and_checked() -> None:
    with LLM(goldens.CHECKPOINT, device="null", max_num_requests=4, num_blocks=64, image_cache_bytes=60 * 512) as llm:
        asked = [prompt for prompt in prompts(6) if len(prompt["images"]) == 1]
        outputs = llm.generate(asked * 2, SHORT)
        assert all(output.finish_reason == "length" for output in outputs)
        encoder = llm._client.core._encoder._executor
        assert 0 < encoder.num_tokens <= 60


def test_chats_see_several_images_in_several_turns() -> None:
    """nano tells the digits of two pictures apart, whichever way they come; `n` answers share one encoding."""
    digits = {}
    for line in NANO_EVAL.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["skill"] == "image_digit" and len(digits) < 2:
            digits.setdefault(record["answer"], record["request"]["messages"][0]["content"])
    (first, shown), (second, other) = digits.items()
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(device="cpu") as llm:
        asked = [{"role": "user", "content": shown}]
        assert llm.chat(asked, greedy)[0].content == first
        data = base64.b64decode(other[0]["image_url"]["url"].partition(",")[2])
        again = [*asked, {"role": "assistant", "content": first}]
        again.append({"role": "user", "content": [{"type": "image", "image": data}, other[1]]})
        outputs = llm.chat([again, asked, [{"role": "user", "content": other}]], greedy)
        assert [output.content for output in outputs[1:]] == [first, second]
        assert outputs[0].prompt_token_ids.count(llm.image_token_id) == sum(
            output.prompt_token_ids.count(llm.image_token_id) for output in outputs[1:]
        )
        pieces = list(llm.stream_chat(again, greedy))
        assert "".join(piece.answer.content for piece in pieces) == outputs[0].content
        answers = llm.chat(asked, SamplingParams(n=3, temperature=0.5, max_tokens=4, seed=1))[0].outputs
        assert len(answers) == 3 and llm.stats().num_encoded_images == 2
        cut = [{"role": "user", "content": [{"type": "image", "image": data[:99]}]}]
        refused, fine = llm.chat([cut, asked], greedy)
        assert "image 1 (messages[0].content[0]) is damaged" in refused.error and fine.content == first
