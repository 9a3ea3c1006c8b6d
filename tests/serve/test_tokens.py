"""`/tokenize`, `/detokenize`, `/generate`, `/abort`, and what the server says of itself."""

import json
import threading

import openai
import pytest

from deepinfer.sampling.params import declared
from deepinfer.serve.app import ROUTES
from serve_client import wait_until

HELLO = [{"role": "user", "content": "Hello"}]
BEGIN = "<｜begin▁of▁sentence｜>"  # token 0


def test_text_goes_to_tokens_and_back(server):
    made = server.post("/tokenize", prompt="Hello, Ж!", return_token_strs=True).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] > 1000
    assert server.post("/detokenize", tokens=made["tokens"]).json() == {"prompt": "Hello, Ж!"}


def test_a_conversation_is_tokenized_as_it_would_be_answered(server):
    made = server.post("/tokenize", messages=HELLO).json()
    answer = server.post("/v1/chat/completions", messages=HELLO, max_tokens=1, return_token_ids=True).json()
    assert made["tokens"] == answer["prompt_token_ids"]
    assert server.post("/detokenize", tokens=made["tokens"]).json()["prompt"].endswith("Hello<｜Assistant｜><think>")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {}), ("/tokenize", {"prompt": 3}), ("/abort", {}), ("/generate", {}),
     ("/detokenize", {"tokens": [-1]}), ("/detokenize", {"tokens": "a"}), ("/detokenize", {"tokens": [True]}),
     ("/generate", {"prompt": "a", "text": "b"})],
)  # fmt: skip
def test_a_wrong_body_is_refused(server, path, body):
    response = server.post(path, **body)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize"])
def test_special_tokens_are_added_to_a_text_as_the_model_says_and_not_otherwise(server, path, monkeypatch):
    def statuses():
        bodies = [{"prompt": "a", "max_tokens": 1, "add_special_tokens": wish} for wish in (False, True)]
        return [server.post(path, **body).status_code for body in bodies]

    assert statuses() == [200, 400]
    monkeypatch.setattr(server.service.tokenizer, "bos_id", 0)
    assert statuses() == [400, 200]
    chatted = [server.post("/tokenize", messages=HELLO, add_special_tokens=wish) for wish in (False, True)]
    assert [response.status_code for response in chatted] == [200, 400], "the prompt of a chat has them anyway"


def test_special_tokens_have_a_text_only_where_ids_become_one(server):
    assert server.post("/detokenize", tokens=[0], skip_special_tokens=False).json() == {"prompt": BEGIN}
    refused = server.post("/detokenize", tokens=[0], skip_special_tokens=True)
    assert refused.status_code == 400 and "spelled out" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["prompt_token_ids", "input_ids"])
def test_generate_takes_and_gives_token_ids(server, name):
    params = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
    whole = server.post("/generate", **{name: [10, 11, 12]}, sampling_params=params).json()
    assert whole["prompt_token_ids"] == [10, 11, 12] and len(whole["token_ids"]) == 4
    events = server.events("/generate", **{name: [10, 11, 12]}, **params)
    assert events.pop() == "[DONE]"
    assert sum((event["token_ids"] for event in events), []) == whole["token_ids"]
    assert events[-1]["finish_reason"] == "length"
    of_sglang = {"max_new_tokens": 4, "seed": 1, "ignore_eos": True}
    again = server.post("/generate", **{name: [10, 11, 12]}, sampling_params=of_sglang).json()
    assert again["token_ids"] == whole["token_ids"]


@pytest.mark.parametrize("by", ["x-request-id", "answer"])
def test_abort_ends_a_stream_by_either_name(server, by):
    body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": f"mine-{by}"}) as response:
        lines = response.iter_lines()
        answer_id = json.loads(next(lines).removeprefix("data: "))["id"]
        name = answer_id if by == "answer" else f"mine-{by}"
        assert server.post("/abort", request_id=name).json() == {"aborted": True}
        rest = [line for line in lines if line]
    assert '"finish_reason": "abort"' in rest[-2] and rest[-1] == "data: [DONE]"
    assert server.post("/abort", request_id=name).json() == {"aborted": False}
    wait_until(server.is_idle)


def test_abort_leaves_the_requests_of_other_keys_alone(null):
    done = threading.Event()
    body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}

    def ask():
        assert null.post("/v1/completions", **body, request_id="one").status_code == 200
        done.set()

    thread = threading.Thread(target=ask)
    thread.start()
    other = null.http.post("/abort", json={"request_id": "one"}, headers={"authorization": "Bearer second-key"})
    assert other.json() == {"aborted": False}
    thread.join()
    assert done.is_set()


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["deepinfer-nano"]
    assert client.models.retrieve("deepinfer-nano").max_model_len > 1000
    with pytest.raises(openai.NotFoundError, match="'other' is not here"):
        client.models.retrieve("other")


def test_models_are_listed_for_anthropics_client_too(server):
    with server.anthropic() as claude:
        (model,) = claude.models.list()
        assert (model.id, model.type, model.display_name) == ("deepinfer-nano", "model", "deepinfer-nano")
        assert model.created_at.timestamp() == server.service.started
        assert claude.models.retrieve("deepinfer-nano") == model


def test_health_ready_and_version(server):
    assert server.http.get("/health").json()["status"] == "ok"
    assert server.http.get("/ready").json() == {"ready": True}
    assert server.http.get("/version").json()["version"]


def test_metrics_count_under_both_names(server):
    def value(name):
        page = server.http.get("/metrics").text
        return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    before = value("deepinfer:generation_tokens_total")
    server.post("/v1/completions", prompt="a", max_tokens=7, ignore_eos=True)
    assert value("deepinfer:generation_tokens_total") == before + 7
    assert value("vllm:generation_tokens_total") == before + 7
    assert value("vllm:kv_cache_usage_perc") == 0 and value("deepinfer:engine_up") == 1
    assert value("vllm:request_success_total") >= 0


@pytest.mark.parametrize(("method", "path", "allowed"), [
    ("GET", "/nothing", None), ("GET", "/v1/completions", "POST"), ("PUT", "/v1/responses/x", "DELETE, GET"),
])  # fmt: skip
def test_an_unknown_path_or_method_has_a_structured_body(server, method, path, allowed):
    response = server.http.request(method, path)
    assert response.status_code == (404 if allowed is None else 405) and response.headers.get("allow") == allowed
    assert response.json()["error"]["message"].startswith(f"{method} {path}")


def test_the_openapi_document_has_every_endpoint_and_parameter(server):
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    missing = [path for _, path, _ in ROUTES if path.startswith("/v1/") and path not in document["paths"]]
    assert missing == ["/v1/models/{name:path}"]
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {spec.name for spec in declared()} | {"cache_salt", "priority"} <= set(schema["properties"])
    assert schema["properties"]["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 100.0}


def test_metrics_tell_what_became_of_drafts_by_place(server):
    body = {"prompt_token_ids": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    assert server.post("/generate", **body).status_code == 200
    lines = dict(line.rsplit(" ", 1) for line in server.http.get("/metrics").text.splitlines() if line[:1] != "#")
    model = 'model_name="deepinfer-nano"'
    for prefix in ("deepinfer:", "vllm:"):
        total = float(lines[f"{prefix}spec_decode_num_accepted_tokens_total{{{model}}}"])
        places = [
            float(lines[f'{prefix}spec_decode_num_accepted_tokens_per_pos_total{{{model},position="{place}"}}'])
            for place in range(5)
        ]
        assert sum(places) == total <= float(lines[f"{prefix}spec_decode_num_draft_tokens_total{{{model}}}"])
    assert float(lines[f'deepinfer:spec_decode_num_proposed_tokens_per_pos_total{{{model},position="0"}}']) > 0
