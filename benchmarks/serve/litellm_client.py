"""LiteLLM as a third client: chat, stream, tools and an error against a running server.

pip install litellm && python benchmarks/serve/litellm_client.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import json

import litellm

ASK = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="deepinfer-nano")
    args = parser.parse_args()
    openai = {"model": f"openai/{args.model}", "api_base": args.url + "/v1", "api_key": "none", "temperature": 0}
    anthropic = {"model": f"anthropic/{args.model}", "api_base": args.url, "api_key": "none", "max_tokens": 200}

    answer = litellm.completion(messages=ASK, **openai)
    assert answer.choices[0].message.content == "42" and answer.choices[0].message.reasoning_content
    pieces = [*litellm.completion(messages=ASK, stream=True, stream_options={"include_usage": True}, **openai)]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == "42"
    assert litellm.completion(messages=ASK, **anthropic).choices[0].message.content == "42"

    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    for _ in range(3):
        answer = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", **openai)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]

    try:
        litellm.completion(messages=ASK, top_p=7, **openai)
        raise AssertionError("a wrong parameter was taken")
    except litellm.BadRequestError as error:
        assert "top_p is 7" in str(error)
    print("LiteLLM: chat, stream, tools over three turns, Messages, error: as they should be")


if __name__ == "__main__":
    main()
