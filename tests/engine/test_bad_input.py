"""What a caller can get wrong: the refusal names the thing, and the engine answers the next request as before."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import goldens
from deepinfer import LLM, CheckpointError, ConfigError, ModelError, QueueFullError, RequestError, SamplingParams
from deepinfer.messages import GenerateRequest
from waiting import PATIENCE, held, wait_until

PROMPT = goldens.prompt(17).tokens
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, seed=1, ignore_eos=True)
HUGE = 10**5000  # too many digits for int.__str__


def name_of(value: Any) -> str | None:
    return "huge" if isinstance(value, int) and abs(value) == HUGE else None


@pytest.fixture(scope="module")
def normal(golden: LLM) -> list[int]:
    return golden.generate(PROMPT, PARAMS)[0].token_ids


@pytest.fixture(autouse=True)
def still_answers(golden: LLM, normal: list[int]) -> Iterator[None]:
    """After each test here the engine is empty and gives the same tokens as ever."""
    yield
    assert golden.generate(PROMPT, PARAMS)[0].token_ids == normal == goldens.prompt(17).greedy[:4]
    stats = golden.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty; give at least one token"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([640], "prompt holds token id 640; ids of this model are 0 to 639"),
        ([3, -1], "prompt holds token id -1; ids of this model are 0 to 639"),
        ([2**31], "prompt holds token id 2147483648"),
        ([2**64], "prompt holds token id 18446744073709551616"),
        ([HUGE], "prompt holds token id <int that cannot be shown>"),
        (None, "prompt is None; it must be a text, a list of token ids"),
        (5, "prompt is 5; it must be"),
        (HUGE, "prompt is <int that cannot be shown>; it must be"),
        ([1.5], "prompt holds 1.5 among its token ids"),
        ([True], "prompt holds True among its token ids"),
        ([1, [2]], re.escape("prompt holds [2] among its token ids")),
        ([1, "a"], "prompt holds 'a' among its token ids"),
        (b"ab", "prompt is b'ab'; it must be"),
        (bytearray(b"ab"), re.escape("prompt is bytearray(b'ab'); it must be")),
        ({1, 2}, "prompt is {1, 2}; it must be"),
        (frozenset([1]), "prompt is frozenset"),
        ({"text": "a"}, "prompt has the keys 'text'; it must have exactly one of prompt, prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt has the keys 'prompt', 'prompt_token_ids'"),
        ({}, "prompt has the keys none"),
        ({"prompt": [1]}, re.escape("prompt is [1]; it must be a text")),
        ({"prompt_token_ids": "a"}, "prompt_token_ids is 'a'; it must be a list of token ids"),
        (np.array(5), re.escape("prompt is array(5); it must be")),
        (np.array([1.0]), "prompt holds .*1.0.* among its token ids"),
        (torch.tensor(5), re.escape("prompt is tensor(5); it must be")),
        ("a\ud800", "lone surrogate"),
        ([1] * 32768, "prompt has 32768 tokens but must have at most 32767"),
        ([1] * 20000, "max_tokens .* needs 157 cache blocks of 128 tokens but only 64 exist"),
    ],
    ids=name_of,
)
def test_a_bad_prompt_is_refused(golden: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        golden.generate(prompt, SamplingParams(max_tokens=1))
    with pytest.raises(RequestError, match=message):
        list(golden.stream(prompt, SamplingParams(max_tokens=1)))


@pytest.mark.parametrize(
    "prompt", [(3, 4), np.array([3, 4]), torch.tensor([3, 4]), (i for i in (3, 4)), range(3, 5), [np.int32(3), 4]]
)
def test_whatever_gives_whole_numbers_in_order_is_a_prompt(golden: LLM, prompt: Any) -> None:
    expected = golden.generate({"prompt_token_ids": [3, 4]}, PARAMS)[0]
    output = golden.generate(prompt, PARAMS)[0]
    assert (output.prompt_token_ids, output.token_ids) == ([3, 4], expected.token_ids)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": float("nan")}, "temperature is nan; it must be finite"),
        ({"temperature": float("inf")}, "temperature is inf; it must be finite"),
        ({"temperature": 10**400}, "temperature is 1000.*; it must be finite"),
        ({"temperature": -1}, "temperature is -1.0; it must be between 0.0 and 100.0"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"top_p": 0}, "top_p is 0; it must be above 0"),
        ({"top_p": HUGE}, "top_p is <int that cannot be shown>; it must be finite"),
        ({"top_k": 2**70}, "top_k is 1180591620717411303424; it must be between -1 and 2147483647"),
        ({"top_k": 2.0}, "top_k is 2.0; it must be a whole number"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be between 0.0 and 1.0"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": None, "seed": HUGE}, "seed is <int that cannot be shown>; it must be between"),
        ({"seed": -1}, "seed is -1; it must be between 0"),
        ({"stop": [""]}, "stop holds ''; each must be a text of 1 to 256 characters"),
        ({"stop": [HUGE]}, "stop holds <int that cannot be shown>"),
        ({"stop": 5}, "stop is 5; it must be a list"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds -1"),
        ({"stop_token_ids": [640]}, "stop_token_ids holds 640; the vocabulary ends at 639"),
        ({"stop_token_ids": [HUGE]}, "stop_token_ids holds <int that cannot be shown>"),
        ({"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"max_tokens": 32760}, "max_tokens is 32760 but prompt .17 tokens. .* <= 32768; lower max_tokens to 32751"),
        ({"max_tokens": HUGE}, "max_tokens is <int that cannot be shown> but prompt"),
    ],
)
def test_a_bad_parameter_is_refused(golden: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        golden.generate(PROMPT, SamplingParams(**values))


@pytest.mark.parametrize("top_k", [2**31 - 1, 0, -1])
def test_extreme_but_valid_parameters_do_not_hurt_the_engine(golden: LLM, top_k: int) -> None:
    params = SamplingParams(
        temperature=1e-30, top_k=top_k, top_p=1e-300, min_p=1.0, seed=2**63 - 1, max_tokens=2, ignore_eos=True,
        logprobs=20,
    )  # fmt: skip
    assert golden.generate(PROMPT, params)[0].token_ids == goldens.prompt(17).greedy[:2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([PARAMS], "params is a list of 1; .* one for each of 2 prompts"),
        ([PARAMS] * 3, "params is a list of 3"),
        ({}, "params is a dict"),
        (0, "params is a int"),
    ],
)
def test_parameters_of_the_wrong_number_or_kind_are_refused(golden: LLM, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        golden.generate([PROMPT, PROMPT], params)
    if not isinstance(params, list):
        with pytest.raises(RequestError, match=message):
            list(golden.stream(PROMPT, params))


@pytest.mark.parametrize("priority", ["1", 1.0, 2**31, -HUGE], ids=name_of)
def test_a_bad_priority_is_refused(golden: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match=r"priority is .*; it must be a whole number from -2147483647 to 2147483647"):
        golden.generate(PROMPT, PARAMS, priority=priority)


def test_a_list_answers_its_good_entries_in_order_and_says_what_is_wrong_with_the_bad_ones(
    golden: LLM, normal: list[int]
) -> None:
    outputs = golden.generate([None, PROMPT, [640], {1}, PROMPT, "", {"x": 1}], PARAMS)
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "error", "length"] + [
        "error"
    ] * 2
    assert outputs[1].token_ids == outputs[4].token_ids == normal
    wrong = ["prompt is None", "token id 640", "prompt is {1}", "prompt is empty", "keys 'x'"]
    for index, message in zip((0, 2, 3, 5, 6), wrong, strict=True):
        assert message in outputs[index].error and outputs[index].token_ids == []


def test_each_prompt_of_a_list_has_its_own_parameters(golden: LLM, normal: list[int]) -> None:
    outputs = golden.generate([PROMPT] * 3, [PARAMS, SamplingParams(max_tokens=40000), PARAMS])
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[2].token_ids == normal and "max_tokens is 40000" in outputs[1].error


def test_an_id_in_use_is_refused_until_its_request_is_over(golden: LLM) -> None:
    stream = golden.stream(PROMPT, SamplingParams(max_tokens=5000, ignore_eos=True), request_id="one")
    next(stream)
    for _ in range(2):
        with pytest.raises(RequestError, match="request_id 'one' belongs to a request that is still running"):
            next(golden.stream(PROMPT, PARAMS, request_id="one"))
    stream.close()
    again = list(golden.stream(PROMPT, PARAMS, request_id="one"))
    assert [delta.request_id for delta in again] == ["one"] * len(again) and again[-1].finish_reason == "length"


def test_a_made_up_id_is_never_that_of_a_caller(golden: LLM) -> None:
    number = int(golden.generate(PROMPT, PARAMS)[0].request_id.removeprefix("request-"))
    stream = golden.stream(PROMPT, SamplingParams(max_tokens=5000, ignore_eos=True), request_id=f"request-{number + 1}")
    next(stream)
    assert golden.generate(PROMPT, PARAMS)[0].request_id == f"request-{number + 2}"
    stream.close()


@pytest.mark.parametrize("request_id", ["", "x" * 257, 5, b"a", HUGE], ids=name_of)
def test_a_bad_id_is_refused(golden: LLM, request_id: Any) -> None:
    with pytest.raises(RequestError, match=r"request_id is .*; it must be a text of 1 to 256 characters"):
        next(golden.stream(PROMPT, PARAMS, request_id=request_id))


def test_a_prompt_that_never_fits_the_pool_is_refused_and_an_open_answer_gets_what_fits() -> None:
    with LLM(goldens.CHECKPOINT, device="null", num_blocks=2) as llm:
        with pytest.raises(RequestError, match="needs 3 cache blocks of 128 tokens but only 2 exist"):
            llm.generate([1] * 257, SamplingParams(max_tokens=1))
        with pytest.raises(RequestError, match="needs 3 cache blocks"):
            llm.generate([1] * 100, SamplingParams(max_tokens=158))
        with pytest.raises(RequestError, match="needs 3 cache blocks"):
            llm.generate([1] * 257)
        outputs = llm.generate([[1] * 100, [1] * 256], SamplingParams(ignore_eos=True))
        assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [("length", 157), ("length", 1)]
        assert llm.stats().num_free_blocks == 2


def test_a_full_queue_refuses_streams_but_generate_waits_for_its_turn() -> None:
    with LLM(goldens.CHECKPOINT, device="null", max_num_requests=1, max_queue=1, num_blocks=64) as llm:
        with held(llm):
            first, second = (llm.stream([1], PARAMS, request_id=name) for name in ("running", "waiting"))
            threads = [threading.Thread(target=list, args=(stream,)) for stream in (first, second)]
            threads[0].start()
            wait_until(lambda: llm.stats().num_running == 1)
            threads[1].start()
            wait_until(lambda: llm.stats().num_waiting == 1)
            with pytest.raises(QueueFullError, match="1 requests wait already and max_queue is 1; try again later"):
                next(llm.stream([1], PARAMS))
            outputs: list[Any] = []
            threads.append(threading.Thread(target=lambda: outputs.extend(llm.generate([[1]] * 5, PARAMS))))
            threads[2].start()
        for thread in threads:
            thread.join()
        assert [output.finish_reason for output in outputs] == ["length"] * 5
        assert llm.stats().num_free_blocks == 64


def test_a_duplicate_id_at_the_engine_door_is_refused_too(golden: LLM) -> None:
    """Callers with id registries of their own share one engine."""
    request = GenerateRequest("twice", np.array([1], np.int32), SamplingParams(max_tokens=5000, seed=1), 0.0)
    one, two = golden._client.subscribe(), golden._client.subscribe()
    with held(golden):
        one.submit(request)
        with pytest.raises(RequestError, match="request id 'twice' is in use; give another one"):
            two.submit(request)
        assert golden.abort("twice")
    while golden._client.is_routed("twice"):
        one.get(timeout=PATIENCE)


# -- the model itself


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(goldens.CHECKPOINT, tmp_path / "model")
    return tmp_path / "model"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_text(folder: Path, **values: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["text_config"].update(values)
    (folder / "config.json").write_text(json.dumps(content))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


Spoil = Callable[[Path], object]
SPOILED: list[tuple[str, Spoil, type[Exception], str]] = [
    ("no config", lambda f: (f / "config.json").unlink(), ModelError, "cannot read .*config.json"),
    ("config is text", lambda f: (f / "config.json").write_text("{"), ModelError, "config.json .*"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), ModelError, "config.json .* object"),
    ("deep config", lambda f: (f / "config.json").write_text("[" * 99999), ModelError, "config.json"),
    ("deep generation", lambda f: (f / "generation_config.json").write_text("[" * 99999), ModelError, "generation_"),
    ("text_config is a list", lambda f: change(f / "config.json", text_config=[1]), ModelError, "text_config"),
    ("architecture", lambda f: change(f / "config.json", architectures=["Llama"]), ModelError,
     r'architectures is \["Llama"\]; this engine runs DeepseekV41ForCausalLM'),
    ("NaN", lambda f: change_text(f, rope_theta=float("nan")), ModelError, "text_config.rope_theta is NaN; it must be"),
    ("no layers", lambda f: change_text(f, num_hidden_layers=0), ModelError, "num_hidden_layers is 0"),
    ("eos in config", lambda f: ((f / "generation_config.json").unlink(), change(f / "config.json", eos_token_id=640)),
     ModelError, "eos_token_id is .*640"),
    ("eos", lambda f: change(f / "generation_config.json", eos_token_id=640), ModelError,
     "eos_token_id is 640, but ids of this model are 0 to 639; correct generation_config.json"),
    ("eos below 0", lambda f: change(f / "generation_config.json", eos_token_id=[1, -1]), ModelError,
     "eos_token_id is -1"),
    ("generation is a list", lambda f: (f / "generation_config.json").write_text("[]"), ModelError,
     "generation_config"),
    ("hot", lambda f: change(f / "generation_config.json", temperature="hot"), ModelError,
     "generation_config.json: temperature is 'hot'"),
    ("NaN temperature", lambda f: change(f / "generation_config.json", temperature=float("nan")), ModelError,
     "generation_config.json: temperature is nan"),
    ("top_k", lambda f: change(f / "generation_config.json", top_k=2**70), ModelError,
     "top_k is 1180591620717411303424"),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), ModelError, "tokenizer.json is missing"),
    ("tokenizer cut", lambda f: truncate(f / "tokenizer.json"), ModelError, "tokenizer.json cannot be read"),
    ("tokenizer decoder", lambda f: change(f / "tokenizer.json", decoder=["x"]), ModelError, "it must be ByteLevel"),
    ("tokenizer empty", lambda f: (f / "tokenizer.json").write_text("{}"), ModelError, "it must be ByteLevel"),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), CheckpointError, "model.safetensors"),
    ("shard cut", lambda f: truncate(f / "model.safetensors"), CheckpointError, "damaged.*model.safetensors"),
    ("shard empty", lambda f: (f / "model.safetensors").write_bytes(b""), CheckpointError, "model.safetensors"),
    ("index", lambda f: (f / "model.safetensors.index.json").write_text("{}"), CheckpointError, "has no weight_map"),
    ("vocabulary", lambda f: change_text(f, vocab_size=641), CheckpointError, "641"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "error", "message"), [case[1:] for case in SPOILED], ids=[case[0] for case in SPOILED]
)
def test_a_spoiled_folder_is_refused(folder: Path, spoil: Spoil, error: type[Exception], message: str) -> None:
    spoil(folder)
    num_threads = threading.active_count()
    with pytest.raises(error, match=f"(?s){message}"):
        LLM(folder)
    assert threading.active_count() <= num_threads


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_modle_len": 5}, "unknown option 'max_modle_len'; did you mean 'max_model_len'?"),
        ({"zzz": 5}, "unknown option 'zzz'; known options: model, revision"),
        ({"max_model_len": 2.5}, "max_model_len is 2.5; it must be a whole number"),
        ({"max_model_len": 32769}, "max_model_len is 32769, but the model's positions end at 32768"),
        ({"max_queue": 0}, "max_queue is 0; it must be at least 1"),
        ({"num_blocks": HUGE}, "num_blocks is <int that cannot be shown>; it must be at most 2147483647"),
        ({"num_blocks": 2**31 - 1}, "2147483647 cache blocks and 64 slots .max_num_requests. take .* lower num_blocks"),
        ({"kv_cache_bytes": 2**62}, "take .* bytes, but (cpu|cuda) has .*kv_cache_bytes"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes is 1, but one block of 128 tokens takes 13440 bytes"),
        ({"num_blocks": 1, "kv_cache_bytes": 1}, "kv_cache_bytes and num_blocks say the same thing"),
        (
            {"max_num_requests": 9, "max_step_tokens": 8},
            "max_step_tokens is 8 but must be at least max_num_requests .9.",
        ),
        ({"layers": 5}, "layers is 5; it must be ascending layer numbers"),
        ({"layers": ["a"]}, "layers is .'a'.; it must be ascending layer numbers"),
        ({"layers": (0, 99)}, "layers names 99; the checkpoint has layers 0 to 7"),
        ({"async_scheduling": "no"}, "async_scheduling is 'no'; it must be true or false"),
        ({"enforce_eager": 1}, "enforce_eager is 1; it must be true or false"),
        ({"precision": "double"}, "precision is 'double'; it must be one of exact, float32, fast"),
        ({"device": None}, "device is None; it must be one of auto, cpu, cuda, null"),
        ({"num_draft_tokens": "0"}, "num_draft_tokens is '0'; it must be a whole number"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(goldens.CHECKPOINT, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device that is missed here")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(
        ConfigError, match="device is 'cuda', but torch sees no CUDA device; use device='cpu' or 'auto'"
    ):
        LLM(goldens.CHECKPOINT, device="cuda")


@pytest.mark.parametrize("model", ["/nowhere/at/all", goldens.CHECKPOINT / "config.json", "not a hub id"])
def test_a_model_that_is_no_folder_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=f"model is '{re.escape(str(model))}'"):
        LLM(model)
