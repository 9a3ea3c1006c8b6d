"""The messages between frontend, engine core and device side: flat numpy arrays, no torch.

GenerateRequest   frontend -> core      one request
StepPlan          scheduler -> runner   what one step computes
StepResult        runner -> scheduler   what it gave
StepOutput        core -> frontend      the same, by request; one message a step
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import CompiledGrammar

Int32 = NDArray[np.int32]
Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the engine core takes it.

    token_ids: [n] int32, n >= 1, every id below the vocabulary size.
    params: `max_tokens` and `seed` are filled in by the frontend, never None here.
    arrival: seconds on `time.monotonic()`.
    wants_prompt_logits: return the logits of every prompt position (`LLM.score`); such a request
        runs every layer for every token, whatever the replay mode.
    grammar: of `params.constraint`, compiled by the engine's client on the way in.
    """

    request_id: str
    token_ids: Int32
    params: SamplingParams
    arrival: float
    priority: int = 0
    wants_prompt_logits: bool = False
    grammar: CompiledGrammar | None = None


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """A slot has a new occupant: what the device must know about it from this step on.

    generated: the answer so far, not empty after a preemption.
    """

    slot: int
    params: SamplingParams
    grammar: CompiledGrammar | None = None
    generated: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One step. Row r computes positions starts[r] .. starts[r] + counts[r] - 1 of slots[r].

    is_prefill: the row's tokens are the next counts[r] entries of `host_tokens`; the tokens of
        the other rows are read on the device, from the slot's token ring.
    samples: the row's last token is the newest known one, so its logits give the next token.
    wants_logits: return the logits of all of the row's tokens.
    decoder_starts: position from which the request's tokens pass the decoder half; 0 = all.
    table_slots, table_columns, table_blocks: block-table entries that changed since the last
        plan, to be written before the step runs.
    """

    step: int
    slots: Int32  # [rows]
    starts: Int32  # [rows]
    counts: Int32  # [rows]
    decoder_starts: Int32  # [rows]
    is_prefill: Bool  # [rows]
    samples: Bool  # [rows]
    wants_logits: Bool  # [rows]
    host_tokens: Int32  # [sum of counts over prefill rows]
    table_slots: Int32  # [changes]
    table_columns: Int32  # [changes]
    table_blocks: Int32  # [changes]
    setups: list[SlotSetup] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the model before any sampling change, one line per sampled token.

    top_ids, top_values hold the K most likely tokens, best first, where K is the largest number
    that any row of the step asked for; a row that asked for fewer reads only its share.
    """

    values: Float32  # [n] of the sampled token
    ranks: Int32  # [n] 1 = the most likely token
    top_ids: Int32  # [n, K]
    top_values: Float32  # [n, K]


@dataclass(slots=True)
class StepResult:
    """What one step gave; line i belongs to the i-th row with `samples`.

    errors: why a line has no token, where it is not the logits; `is_finite` is False there too.
    """

    step: int
    token_ids: Int32  # [n]
    is_finite: Bool  # [n] False: the logits held NaN or no finite value; the token means nothing
    logprobs: Logprobs | None = None
    prompt_logits: dict[int, Float32] = field(default_factory=dict)  # row -> [counts[row], vocab]
    seconds: float = 0.0  # device side time of the step
    errors: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds on `time.monotonic()`; None where the request never got that far."""

    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended. `error` says why when the reason is "error"."""

    request_id: str
    reason: FinishReason
    times: RequestTimes
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    stop_token: int | None = None  # the end-of-sequence or stop token that ended it
    error: str | None = None


@dataclass(slots=True)
class StepOutput:
    """New tokens and ends of requests after one step; the lines of `logprobs` follow `token_ids`."""

    request_ids: list[str]
    token_ids: Int32  # [len(request_ids)]
    logprobs: Logprobs | None = None
    finished: list[Finished] = field(default_factory=list)
    prompt_logits: list[tuple[str, int, Float32]] = field(default_factory=list)  # id, first position, logits
