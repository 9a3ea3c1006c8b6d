"""SamplingParams: everything a caller can ask of the choice of tokens, declared once.

A field carries its own check, range, help text and other API names; the command line, a server and
the docs read them from the class, so a new parameter is one field here and one stage (`stages.py`).
This module does not load torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.errors import RequestError, shown
from deepinfer.sampling import checks
from deepinfer.sampling.checks import Check, TokenBias
from deepinfer.structured.grammar import Constraint, Grammar, read_so_args, read_structured_outputs

MAX_COUNT = 2**31 - 1  # counts are int32 on their way to the device
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 64
MAX_BIASES = 2**14
MAX_BIAS = 100.0
MAX_ALLOWED_TOKENS = 2**18
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_GOLDEN_TOKENS = 2**20
MIN_FACTOR, MAX_FACTOR = 0.01, 100.0  # of the repetition penalty: scaled logits stay in float32

LogprobsMode = Literal["raw", "processed"]
BIAS_RULE = f"ids with biases of -{MAX_BIAS:g} to {MAX_BIAS:g}, at most {MAX_BIASES}"


def parameter(
    check: Check,
    default: Any,
    help_text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    rule: str = "",
    names: tuple[str, ...] = (),
) -> Any:
    """A field with its check, default, help text and inclusive range.

    rule: the range in words, where two numbers do not say it. names: what else APIs call it.
    """
    metadata = {"check": check, "help": help_text, "low": low, "high": high, "rule": rule, "names": names}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Raises RequestError for a value of the wrong type or out of range, naming it.
    """

    max_tokens: int | None = parameter(
        checks.whole, None, "most tokens to generate; None = what fits", low=1, names=("max_new_tokens",)
    )
    temperature: float = parameter(checks.number, 1.0, "0 = greedy", low=0.0, high=100.0)
    top_k: int = parameter(checks.whole, 0, "keep the k most likely tokens; 0 or -1 = all", low=-1, high=MAX_COUNT)
    top_p: float = parameter(
        checks.number, 1.0, "keep the likeliest tokens up to this total probability", low=0.0, high=1.0,
        rule="above 0, to 1",
    )  # fmt: skip
    min_p: float = parameter(checks.number, 0.0, "drop tokens below this share of the likeliest one", low=0.0, high=1.0)
    seed: int | None = parameter(
        checks.whole, None, "same seed, prompt and parameters: same text; None = random", low=0, high=MAX_SEED,
        names=("seq_seed",),
    )  # fmt: skip
    n: int = parameter(checks.whole, 1, "answers to each prompt, each with a seed of its own", low=1, high=MAX_SAMPLES)
    stop: tuple[str, ...] = parameter(
        checks.texts(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS), (), "texts that end the answer; they are cut off",
        rule=f"at most {MAX_STOP_STRINGS} of at most {MAX_STOP_CHARACTERS} characters",
    )  # fmt: skip
    stop_token_ids: tuple[int, ...] = parameter(
        checks.token_ids(MAX_STOP_TOKENS), (), "tokens that end the answer", rule=f"at most {MAX_STOP_TOKENS}"
    )
    include_stop_str_in_output: bool = parameter(
        checks.switch, False, "keep the text of what ended the answer: stop string or stop token"
    )
    ignore_eos: bool = parameter(checks.switch, False, "go on after the end-of-sequence token")
    min_tokens: int = parameter(
        checks.whole, 0, "tokens before which neither end-of-sequence nor a stop token or string can end the answer",
        low=0, high=MAX_COUNT,
    )  # fmt: skip
    repetition_penalty: float = parameter(
        checks.number, 1.0, "divides positive and multiplies other logits of all tokens in prompt and answer so far",
        low=MIN_FACTOR, high=MAX_FACTOR,
    )  # fmt: skip
    presence_penalty: float = parameter(
        checks.number, 0.0, "taken from the logits of tokens in the answer so far", low=-2.0, high=2.0
    )
    frequency_penalty: float = parameter(
        checks.number, 0.0, "taken from the logit of a token for each time it is in the answer so far",
        low=-2.0, high=2.0,
    )  # fmt: skip
    logit_bias: tuple[TokenBias, ...] = parameter(
        checks.biases(MAX_BIASES, MAX_BIAS), (), "added to the logits of tokens, as in {17: -100, 42: 2.5}",
        rule=BIAS_RULE,
    )  # fmt: skip
    allowed_token_ids: tuple[int, ...] | None = parameter(
        checks.token_ids(MAX_ALLOWED_TOKENS, min_count=1), None, "the only tokens to choose from",
        rule=f"1 to {MAX_ALLOWED_TOKENS}",
    )  # fmt: skip
    bad_words: tuple[str, ...] = parameter(
        checks.texts(MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS), (),
        "texts that the answer must not write, neither with a space before them",
        rule=f"at most {MAX_BAD_WORDS} of at most {MAX_BAD_WORD_CHARACTERS} characters",
    )  # fmt: skip
    golden_token_ids: tuple[int, ...] | None = parameter(
        checks.token_ids(MAX_GOLDEN_TOKENS, min_count=1, unique=False), None,
        "tokens that the answer is made of, whatever the model says of them", rule=f"1 to {MAX_GOLDEN_TOKENS}",
    )  # fmt: skip
    logprobs: int | None = parameter(
        checks.whole, None, "log-probabilities of the chosen and this many best tokens", low=0, high=MAX_LOGPROBS,
        names=("top_logprobs",),
    )  # fmt: skip
    logprobs_mode: LogprobsMode = parameter(
        checks.word("raw", "processed"), "raw", "log-probabilities of the model, or of what tokens are drawn from"
    )
    prompt_logprobs: int | None = parameter(
        checks.whole, None, "log-probabilities of the prompt's and this many best tokens", low=0, high=MAX_LOGPROBS
    )
    structured_outputs: Grammar | None = parameter(
        lambda name, value: read_structured_outputs(value), None,
        "what the answer must match: one of json, json_object, regex, grammar, choice, structural_tag",
    )  # fmt: skip
    so_args: Constraint | None = parameter(
        lambda name, value: read_so_args(value), None,
        "the same from a trigger on: schema_type, schema, trigger_token_ids, bound_token_id",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if value is not None or spec.default is not None:
                stored = spec.metadata["check"](spec.name, value)
                _check_range(spec, stored)
                object.__setattr__(self, spec.name, stored)
        if self.top_p == 0.0:
            raise RequestError("top_p is 0; it must be above 0 (use temperature=0 for the likeliest token)")
        if self.n > 1 and self.temperature == 0.0:
            raise RequestError(
                f"n is {self.n} but temperature is 0: all answers would be one; set n=1 or a temperature"
            )
        if self.constraint is not None:
            _check_constraint(self)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be at most max_tokens ({self.max_tokens})")

    def check_ids(self, vocab_size: int) -> None:
        """Raise RequestError if a token id is not below the size of the vocabulary."""
        lists = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "golden_token_ids": self.golden_token_ids or (),
            "logit_bias": tuple(one.token_id for one in self.logit_bias),
            "so_args": () if self.so_args is None else self.so_args.trigger,
        }
        for name, ids in lists.items():
            if ids and max(ids) >= vocab_size:
                raise RequestError(f"{name} holds {shown(max(ids))}; the vocabulary ends at {vocab_size - 1}")

    @property
    def constraint(self) -> Constraint | None:
        """The grammar that the answer follows, and where it begins."""
        return self.so_args if self.structured_outputs is None else Constraint(self.structured_outputs)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From API or JSON names. Unknown names are errors.

        `max_new_tokens` is another name of `max_tokens`, `seq_seed` of `seed`, `top_logprobs` of `logprobs`; `logprobs`
        may also be true or false, and then `top_logprobs` is the number.
        """
        values = dict(values)
        if isinstance(values.get("logprobs"), bool):
            is_wanted = values.pop("logprobs")
            if values.get("top_logprobs") is None:
                values["top_logprobs"] = 0 if is_wanted else None
            elif not is_wanted:
                raise RequestError("top_logprobs is set but logprobs is false; leave one of them out")
        specs = dataclasses.fields(cls)
        for spec in specs:
            for other in spec.metadata["names"]:
                if other in values:
                    if values.get(spec.name) is not None:
                        raise RequestError(f"{spec.name} and {other} are two names of one parameter; give one of them")
                    values[spec.name] = values.pop(other)
        known = [spec.name for spec in specs]
        for name in values:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {shown(name)}; known are {', '.join(known)}")
        return cls(**values)


def merge_params(defaults: SamplingParams, *layers: Mapping[str, Any]) -> SamplingParams:
    """Parameters from defaults and named values, later ones first; raises RequestError like SamplingParams."""
    values: dict[str, Any] = {spec.name: getattr(defaults, spec.name) for spec in dataclasses.fields(defaults)}
    for layer in layers:
        for spec in dataclasses.fields(defaults):
            if any(name in layer for name in spec.metadata["names"]):
                values.pop(spec.name, None)
        values.update(layer)
    return SamplingParams.from_mapping(values)


def declared() -> tuple[dataclasses.Field[Any], ...]:
    """The declared parameters in order, with what `parameter` put into their metadata."""
    return dataclasses.fields(SamplingParams)


def _check_constraint(params: SamplingParams) -> None:
    if params.structured_outputs is not None and params.so_args is not None:
        raise RequestError("structured_outputs and so_args are two ways to give a grammar; give one of them")
    if params.ignore_eos is not False:
        raise RequestError("ignore_eos is set, but an answer under a grammar ends where the grammar does; leave it out")
    if params.golden_token_ids is not None:
        raise RequestError("golden_token_ids is the answer itself; a grammar cannot shape it, so leave one of them out")


def _check_range(spec: dataclasses.Field[Any], value: Any) -> None:
    low, high = spec.metadata["low"], spec.metadata["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        rule = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{spec.name} is {shown(value)}; it must be {rule}")
