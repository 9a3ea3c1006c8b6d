"""The fields of a body that are not the protocol's own: sampling parameters by their declared names, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    "verbosity", "spaces_between_special_tokens", "parallel_tool_calls",
})  # fmt: skip
# Fields that may only say what is so anyway, and why.
FIXED = {
    "modalities": (["text"], "answers are text"),
    "skip_special_tokens": (True, "special tokens have no text; set return_token_ids to see them"),
    "add_special_tokens": (False, "a text is encoded as it is; give token ids to begin with a special one"),
    "separate_reasoning": (True, "thinking is never part of the content"),
}
# The same where a model wants every text to begin with its own token, and where ids become a text.
BEGUN = {"add_special_tokens": (True, "this model's texts begin with its own token; give token ids to begin otherwise")}
SPELLED_OUT = {"skip_special_tokens": (False, "special tokens are spelled out")}
# Of fields that are objects: what is read in them.
MEMBERS = {
    "stream_options": frozenset({"include_usage", "continuous_usage_stats", "include_obfuscation"}),
    "chat_template_kwargs": frozenset({"thinking", "enable_thinking", "reasoning_effort", "effort"}),
}


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


def unknown(body: Mapping[str, Any], own: Iterable[str], left_out: Iterable[str] = ()) -> list[str]:
    """The fields that nobody reads. own: those of the protocol. left_out: as in `sampling_params`."""
    known = (SAMPLING - set(left_out)) | COMMON | HARMLESS | {*FIXED, "max_completion_tokens"} | set(own)
    inner = [f"{name}.{one}" for name, names in MEMBERS.items() for one in mapping(body, name) if one not in names]
    return [name for name in body if name not in known] + inner


def check_wishes(
    body: Mapping[str, Any], refused: Mapping[str, str], fixed: Mapping[str, tuple[object, str]] | None = None
) -> None:
    """Raise RequestError for a field whose wish cannot be met.

    refused: names of such fields, and the way out. fixed: goes before FIXED.
    """
    for name, way_out in refused.items():
        if body.get(name):
            raise RequestError(f"{name} is set, but {way_out}")
    for name, (only, reason) in (FIXED | dict(fixed or {})).items():
        if body.get(name) not in (None, only):
            raise RequestError(f"{name} is {shown(body[name])}; it must be {shown(only)} or left out: {reason}")


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


def texts(body: Mapping[str, Any], name: str) -> Sequence[str]:
    """A field that is a list of texts; an empty one if it is not given. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError(f"{name} is {shown(value)}; it must be a list of texts")
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object; an empty one if it is not given. Raises RequestError."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}; it must be an object")
    return value
