"""The fields of a body that are not the protocol's own: sampling parameters by their declared names, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepinfer.errors import RequestError, shown
from deepinfer.sampling.params import SamplingParams, declared, merge_params

SAMPLING = frozenset(name for spec in declared() for name in (spec.name, *spec.metadata["names"]))
# vLLM's older names of the members of `structured_outputs`.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
MAX_TOKENS = ("max_tokens", "max_completion_tokens", "max_new_tokens")  # names of one thing
# Of this engine, in every protocol that generates.
COMMON = frozenset({
    "model", "stream", "priority", "request_id", "cache_salt", "return_token_ids", "stop_in_thinking", *GUIDED,
})  # fmt: skip
# What clients send as a matter of course and what changes nothing here.
HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "modalities", "add_generation_prompt", "include_reasoning", "separate_reasoning",
    "skip_special_tokens", "spaces_between_special_tokens", "parallel_tool_calls", "add_special_tokens",
})  # fmt: skip


def sampling_params(
    body: Mapping[str, Any], defaults: SamplingParams, *, leave_out: Iterable[str] = (), **more: Any
) -> SamplingParams:
    """The sampling parameters of a body over the defaults; null counts as not given.

    leave_out: fields that mean something else in this protocol. more: goes before the body.
    Raises RequestError.
    """
    wanted = SAMPLING - set(leave_out)
    values = {name: value for name, value in body.items() if name in wanted and value is not None}
    guided = {form: body[name] for name, form in GUIDED.items() if body.get(name) is not None}
    if guided:
        if "structured_outputs" in values:
            raise RequestError("structured_outputs is given twice, once in parts; give it once")
        values["structured_outputs"] = guided
    if values.get("max_tokens") is None and body.get("max_completion_tokens") is not None:
        values["max_tokens"] = body["max_completion_tokens"]
    return merge_params(defaults, values, {name: value for name, value in more.items() if value is not None})


def unknown(body: Mapping[str, Any], own: Iterable[str]) -> list[str]:
    """The fields that nobody reads. own: those of the protocol."""
    known = SAMPLING | COMMON | HARMLESS | {"max_completion_tokens"} | set(own)
    return [name for name in body if name not in known]


def switch(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A field that is true or false; null counts as not given. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; it must be true or false")
    return value


def text(body: Mapping[str, Any], name: str) -> str | None:
    """A field that is a text. Raises RequestError."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} is {shown(value)}; it must be a text")
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object; an empty one if it is not given. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}; it must be an object")
    return value
