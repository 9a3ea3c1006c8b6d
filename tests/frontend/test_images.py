"""Images in prompts and in chats of three protocols: where they stand, and what is refused."""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.frontend.chat import ChatEncoder, ChatPrompt
from deepinfer.frontend.images import listed_images
from deepinfer.frontend.prompt import RequestBuilder
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.images.prepare import ImagePreparer
from deepinfer.images.sources import image_bytes
from deepinfer.messages import GenerateRequest
from images.pictures import LIMITS, encoded, geometry, picture

TOKEN = 4095
FILE, OTHER = encoded(picture(130, 90, seed=1)), encoded(picture(90, 200, seed=2))
URL = "data:image/png;base64," + base64.b64encode(FILE).decode()
OTHER_URL = "data:image/png;base64," + base64.b64encode(OTHER).decode()


@pytest.fixture(scope="module")
def builder(tokenizer: Tokenizer) -> RequestBuilder:
    preparer = ImagePreparer(geometry("nano"), ImageOptions(max_images=3))
    return RequestBuilder(tokenizer, 4096, 2048, images=preparer)


@pytest.fixture(scope="module")
def encoder(nano: Path) -> ChatEncoder:
    return ChatEncoder(nano / "tokenizer.json")


def build(builder: RequestBuilder, prompt: Any, **settings: Any) -> GenerateRequest:
    return builder.build(prompt, request_id="r", **settings)


def part(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def files(prompt: ChatPrompt) -> list[tuple[bytes, str]]:
    """The bytes and the detail of each image."""
    return [(image_bytes(image.source, image.name, LIMITS), image.detail) for image in prompt.images]


# -- prompts


def test_each_placeholder_becomes_the_positions_of_its_image(builder: RequestBuilder) -> None:
    request = build(builder, {"prompt_token_ids": [0, 7, TOKEN, 8, TOKEN], "images": [FILE, OTHER]})
    first, second = request.images
    n, m = first.image.num_tokens, second.image.num_tokens
    assert request.token_ids.tolist() == [0, 7, *[TOKEN] * n, 8, *[TOKEN] * m]
    assert [(span.start, span.end) for span in request.images] == [(2, 2 + n), (3 + n, 3 + n + m)]
    height, width, _ = first.image.pixels.shape
    assert n == geometry("nano").num_tokens(width, height)
    assert first.image.key != second.image.key


def test_the_spelling_of_the_placeholder_counts_in_a_text(builder: RequestBuilder) -> None:
    request = build(builder, {"prompt": "see <｜image｜> there", "images": [FILE]})
    assert len(request.images) == 1 and (request.token_ids == TOKEN).sum() == request.images[0].image.num_tokens


def test_sources_of_every_kind_give_the_same_image(builder: RequestBuilder, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    sources = [FILE, URL, tmp_path / "a.png", str(tmp_path / "a.png"), Image.open(tmp_path / "a.png")]
    prompts = [{"prompt": "<｜image｜>", "images": [source]} for source in sources]
    keys = {build(builder, prompt).images[0].image.key for prompt in prompts}
    assert len(keys) == 1


def test_multi_modal_data_is_another_way_to_give_images(builder: RequestBuilder) -> None:
    ids = [0, TOKEN, 5, TOKEN]
    plain = build(builder, {"prompt_token_ids": ids, "images": [FILE, OTHER]})
    data = {"image_bytes": [FILE, OTHER], "image_sizes": [(130, 90), [90, 200]]}
    for given in (data, {"image_bytes": (FILE, OTHER)}):
        request = build(builder, {"prompt_token_ids": ids, "multi_modal_data": given})
        assert np.array_equal(request.token_ids, plain.token_ids)
        assert [span.image.key for span in request.images] == [span.image.key for span in plain.images]
    alone = build(builder, {"prompt_token_ids": [TOKEN], "multi_modal_data": {"image_bytes": FILE}})
    assert len(alone.images) == 1


@pytest.mark.parametrize(
    ("ids", "images", "message"),
    [
        ([0, TOKEN], [], r"prompt has 1 image placeholders \(token 4095\) but 0 images are given"),
        ([0, 5], [FILE], r"prompt has 0 image placeholders \(token 4095\) but 1 images are given"),
        ([TOKEN, TOKEN], [FILE], r"prompt has 2 image placeholders \(token 4095\) but 1 images"),
        ([TOKEN] * 4, [FILE] * 4, r"prompt has 4 images; it may have 3, leave some out or raise --max-images"),
        ([TOKEN, TOKEN], [FILE, b"no image"], r"^images\[1\] is no image in one of the formats"),
        ([TOKEN], [FILE[:200]], r"^images\[0\] is damaged or cut off"),
        ([TOKEN], URL, r"images is 'data:image.*; it must be a list"),
        ([TOKEN], None, r"images is None; it must be a list"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_refused(
    builder: RequestBuilder, ids: list[int], images: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        build(builder, {"prompt_token_ids": ids, "images": images})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image_bytes": [FILE], "image_sizes": []}, "1 image_bytes but 0 image_sizes"),
        ({"image_bytes": [FILE], "image_sizes": 7}, r"image_sizes is 7; it must be a list of \(width, height\)"),
        ({"image_bytes": [FILE], "image_sizes": [(90, 130)]}, r"image_bytes\[0\] is 130 x 90 pixels, but its size is"),
        ({"image_bytes": [URL]}, r"image_bytes\[0\] is 'data:.*; it must be the bytes of an image file"),
        ({"image_bytes": 7}, "image_bytes is 7; it must be a list"),
        ({"image_sizes": []}, "it must hold image_bytes"),
        ({"image_bytes": [FILE], "videos": []}, "it must hold image_bytes, a list, and may hold image_sizes"),
        ([FILE], "it must hold image_bytes"),
    ],
)
def test_multi_modal_data_of_another_shape_are_refused(builder: RequestBuilder, data: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build(builder, {"prompt_token_ids": [TOKEN], "multi_modal_data": data})


def test_images_are_given_in_one_way(builder: RequestBuilder) -> None:
    prompt = {"prompt_token_ids": [TOKEN], "images": [FILE], "multi_modal_data": {"image_bytes": [FILE]}}
    with pytest.raises(RequestError, match="prompt has images and multi_modal_data; give the images in one way"):
        build(builder, prompt)


def test_a_prompt_counts_the_positions_of_its_images(tokenizer: Tokenizer) -> None:
    small = RequestBuilder(tokenizer, 4096, 16, images=ImagePreparer(geometry("nano"), ImageOptions()))
    with pytest.raises(RequestError, match=r"prompt has \d\d tokens with images\[0\] but must have at most 15"):
        build(small, {"prompt": "<｜image｜>", "images": [FILE]})


def test_images_behind_the_end_of_the_context_are_not_read(tokenizer: Tokenizer) -> None:
    preparer = ImagePreparer(geometry("nano"), ImageOptions())
    one = preparer.prepare(FILE, "it").num_tokens
    small = RequestBuilder(tokenizer, 4096, 2 * one + 5, images=preparer)
    assert (
        len(build(small, {"prompt_token_ids": [0, TOKEN, TOKEN, 5], "images": [FILE, FILE]}).token_ids) == 2 * one + 2
    )
    told = rf"^prompt has {3 * one + 3} tokens with images\[2\] but must have at most {2 * one + 4}; give fewer"
    with pytest.raises(RequestError, match=told):
        build(small, {"prompt_token_ids": [0, *[TOKEN] * 5], "images": [FILE, FILE, FILE, "not read", "not read"]})
    assert (
        len(small.spelled_out([0, *[TOKEN] * 50], listed_images([FILE] * 50))) == 1 + 50 * one
    )  # counted all the same


def test_pixels_that_can_never_be_held_are_refused_before_the_rest_is_read(tokenizer: Tokenizer) -> None:
    size = ImagePreparer(geometry("nano"), ImageOptions()).prepare(FILE, "it").pixels.nbytes
    small = RequestBuilder(
        tokenizer, 4096, 2048, images=ImagePreparer(geometry("nano"), ImageOptions(image_queue_bytes=size + 5))
    )
    build(small, {"prompt_token_ids": [0, TOKEN, TOKEN], "images": [FILE, FILE]})  # equal ones are held once
    told = rf"up to images\[1\]: the pixels of its images take \d+ bytes, but image_queue_bytes is {size + 5}"
    with pytest.raises(RequestError, match=told):
        build(small, {"prompt_token_ids": [0, *[TOKEN] * 3], "images": [FILE, OTHER, "not read"]})


def test_images_of_two_prompts_at_most_are_prepared_at_a_time(tokenizer: Tokenizer) -> None:
    preparer = ImagePreparer(geometry("nano"), ImageOptions())
    small = RequestBuilder(tokenizer, 4096, 2048, images=preparer)
    prompt = {"prompt_token_ids": [0, TOKEN], "images": [FILE]}
    with ThreadPoolExecutor(1) as pool:
        with preparer.turns, preparer.turns:
            waiting = pool.submit(build, small, prompt)
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
        assert len(waiting.result(60).images) == 1
    with pytest.raises(RequestError):
        build(small, {"prompt_token_ids": [0, TOKEN], "images": [b"damaged"]})
    assert preparer.turns.acquire(blocking=False) and preparer.turns.acquire(blocking=False)  # both were given back


def test_a_model_without_an_encoder_refuses_images(tokenizer: Tokenizer) -> None:
    blind = RequestBuilder(tokenizer, 4096, 2048)
    with pytest.raises(RequestError, match=r"images\[0\] is given, but this model takes no images; leave it out"):
        build(blind, {"prompt_token_ids": [TOKEN], "images": [FILE]})
    assert build(blind, [0, TOKEN]).token_ids.tolist() == [0, TOKEN]


# -- chats


def test_images_of_several_turns_come_in_order_with_their_detail(encoder: ChatEncoder) -> None:
    messages = [
        {"role": "user", "content": [part(URL), {"type": "text", "text": "What?"}, part(OTHER_URL, detail="low")]},
        {"role": "assistant", "content": "A thing."},
        {"role": "user", "content": [{"type": "text", "text": "And <｜image｜>?"}, part(URL, detail="original")]},
    ]
    prompt = encoder.encode(messages)
    assert prompt.token_ids.count(TOKEN) == 3  # a spelling in a text is text
    assert files(prompt) == [(FILE, "high"), (OTHER, "low"), (FILE, "original")]
    assert encoder.encode_body({"messages": messages}).token_ids == prompt.token_ids


def test_python_callers_may_give_paths_bytes_and_pictures(encoder: ChatEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    given = [tmp_path / "a.png", FILE, OTHER_URL]
    content = [{"type": "image", "image": image} for image in given] + [{"type": "text", "text": "Same?"}]
    content.insert(1, part(URL))
    prompt = encoder.encode([{"role": "user", "content": content}])
    assert [data for data, _ in files(prompt)] == [FILE, FILE, FILE, OTHER]
    low = {"type": "image", "image": FILE, "detail": "low"}
    assert files(encoder.encode([{"role": "user", "content": [low]}])) == [(FILE, "low")]
    urls = [part(URL), part(URL), part(URL), part(OTHER_URL)]
    same = encoder.encode([{"role": "user", "content": [*urls, content[-1]]}])
    assert prompt.token_ids == same.token_ids


BODIES = [
    ("chat", {"messages": [{"role": "user", "content": [part(URL, detail="low"), {"type": "text", "text": "What?"}]}]}),
    (
        "messages",
        {
            "max_tokens": 9,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {
                                "type": "base64",
                                "media_type": "image/png",
                                "data": base64.b64encode(FILE).decode(),
                            },
                        },
                        {"type": "text", "text": "What?"},
                    ],
                }
            ],
        },
    ),
    (
        "responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "low"},
                        {"type": "input_text", "text": "What?"},
                    ],
                }
            ]
        },
    ),
]


@pytest.mark.parametrize(("protocol", "body"), BODIES)
def test_bodies_of_three_protocols_give_one_prompt(encoder: ChatEncoder, protocol: Any, body: dict) -> None:
    prompt = encoder.encode_body({"model": "whatever", **body}, protocol)
    expected = encoder.encode_body(BODIES[0][1])
    end = expected.token_ids.index(TOKEN) + 1
    tail = expected.token_ids[end:]
    assert prompt.token_ids[-len(tail) :] == tail and prompt.token_ids.count(TOKEN) == 1
    assert files(prompt) == [(FILE, "high" if protocol == "messages" else "low")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([part("https://example.org/a.png")], r"image 1 \(messages\[0\]\) is at 'https://example.org/a.png'; this"),
        ([part("/etc/hostname")], r"messages\[0\]: Unsupported image_url format"),
        ([part("file:///etc/hostname")], r"messages\[0\]: Unsupported image_url format"),
        ([{"type": "image", "image": "/etc/hostname"}], r"unknown variant `image`"),
        ([part("data:image/png;base64,@")], r"messages\[0\]: Invalid base64 data"),
        ([part(URL, detail="fine")], r"unknown variant `fine`"),
    ],
)
def test_a_body_reaches_neither_network_nor_files(encoder: ChatEncoder, content: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        encoder.encode_body({"messages": [{"role": "user", "content": content}]})


def test_a_damaged_image_of_a_chat_is_named_by_its_place(encoder: ChatEncoder, builder: RequestBuilder) -> None:
    cut = "data:image/png;base64," + base64.b64encode(FILE[:99]).decode()
    messages = [{"role": "user", "content": [part(URL)]}, {"role": "user", "content": [part(cut)]}]
    prompt = encoder.encode(messages)
    with pytest.raises(RequestError, match=r"^image 2 \(messages\[1\]\) is damaged or cut off"):
        build(builder, prompt.token_ids, images=prompt.images)
    prompt = encoder.encode([{"role": "user", "content": [{"type": "image", "image": b"x"}]}])
    with pytest.raises(RequestError, match=r"^image 1 \(messages\[0\].content\[0\]\) is no image"):
        build(builder, prompt.token_ids, images=prompt.images)


def test_prompts_of_the_skills_file_hold_their_images(nano: Path, encoder: ChatEncoder, tokenizer: Tokenizer) -> None:
    lines = (nano / "eval" / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["skill"].startswith("image_")]
    assert len(records) == 120
    for record in records:
        prompt = encoder.encode_body(record["request"])
        assert len(prompt.images) == prompt.token_ids.count(TOKEN) == 1
        spelled = tokenizer.encode(record["prompt"].replace("<｜image｜>", "<｜image｜>\n\n"))
        assert prompt.token_ids == spelled  # deepseek-recipe puts an empty line between parts
