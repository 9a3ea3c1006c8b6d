"""The messages between frontend, engine core and device side: flat numpy arrays, no torch.

GenerateRequest   frontend -> core      one request
StepPlan          scheduler -> runner   what one step computes
StepResult        runner -> scheduler   what it gave
StepOutput        core -> frontend      the same, by request; one message a step
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepinfer.images.messages import ImagePlace, ImageSpan
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import CompiledGrammar

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Float32 = NDArray[np.float32]
TokenSequences = tuple[tuple[int, ...], ...]
FinishReason = Literal["stop", "length", "abort", "error"]


def _nothing() -> Int32:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the engine core takes it.

    token_ids: [n] int32, n >= 1, every id below the vocabulary size.
    params: `max_tokens` and `seed` are filled in by the frontend, never None here.
    arrival: seconds on `time.monotonic()`.
    wants_prompt_logits: return the logits of every prompt position (`LLM.score`); such a request
        runs every layer for every token, whatever the replay mode.
    bad_word_ids: the token sequences that `params.bad_words` stand for.
    grammar: of `params.constraint`, compiled by the engine's client on the way in.
    images: in order; `token_ids` holds the image token at all of their positions.
    cache_salt: requests of different salts share nothing that is remembered of prompts.
    """

    request_id: str
    token_ids: Int32
    params: SamplingParams
    arrival: float
    priority: int = 0
    wants_prompt_logits: bool = False
    bad_word_ids: TokenSequences = ()
    grammar: CompiledGrammar | None = None
    images: tuple[ImageSpan, ...] = ()
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class SlotSetup:
    """A slot has a new occupant: what the device must know about it from this step on.

    token_ids: [known] int32, prompt and the answer so far (after a preemption).
    bad_word_ids, grammar: see `GenerateRequest`.
    """

    slot: int
    params: SamplingParams
    num_prompt: int
    token_ids: Int32
    bad_word_ids: TokenSequences = ()
    grammar: CompiledGrammar | None = None

    @property
    def limit(self) -> int:
        """Positions computed at most: all but that of the last token of the longest answer."""
        assert self.params.max_tokens is not None, "max_tokens is filled in by the frontend"
        return self.num_prompt + self.params.max_tokens - 1


@dataclass(slots=True)
class StepPlan:
    """One step. Row r computes positions starts[r] .. starts[r] + counts[r] - 1 of slots[r].

    is_prefill: the row's tokens are the next counts[r] entries of `host_tokens`; the tokens of
        the other rows are read on the device, from the slot's token ring. Such a decode row is the
        newest token and up to counts[r] - 1 drafts that are to be checked. How many drafts of the steps in
        flight will be accepted is not known here: starts[r] is the least it can be, and the device,
        which knows, moves the row on (`speculate/progress.py`).
    is_plain: all rows are newest tokens, and no step in flight computes a draft or a prompt, so that they begin where
        the plan says; drafting rests.
    samples: the row's last token is the newest known one, so its logits give the next token; those
        of a decode row's drafts give the tokens after them.
    wants_logits: return the logits of all of the row's tokens.
    decoder_starts: position from which the request's tokens pass the decoder half; 0 = all.
    logprob_rows: rows of which the first logprob_counts tokens give log-probabilities of prompt tokens;
        logprob_targets holds the token after each of them, row by row.
    images: those among the step's tokens, whole, each encoded by then.
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
    images: list[ImagePlace] = field(default_factory=list)
    is_plain: bool = False
    logprob_rows: Int32 = field(default_factory=_nothing)  # [scored rows]
    logprob_counts: Int32 = field(default_factory=_nothing)  # [scored rows], 1 or more
    logprob_targets: Int32 = field(default_factory=_nothing)  # [sum of logprob_counts]

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def has_prefill(self) -> bool:
        """Whether any row is a prefill; all rows sample otherwise, and no prompt is scored."""
        return len(self.host_tokens) > 0

    @property
    def num_tokens(self) -> int:
        return len(self.slots) if self.is_plain else int(self.counts.sum())

    def moved(self, slots: Int32, starts: Int32, counts: Int32, decoder_starts: Int32) -> StepPlan:
        """The same step with other places of its rows (`dataclasses.replace` takes several times as long)."""
        return StepPlan(
            self.step, slots, starts, counts, decoder_starts, self.is_prefill, self.samples, self.wants_logits,
            self.host_tokens, self.table_slots, self.table_columns, self.table_blocks, self.setups, self.images,
            self.is_plain, self.logprob_rows, self.logprob_counts, self.logprob_targets,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities, one line per sampled token (see `SamplingParams.logprobs_mode`) or prompt token.

    top_ids, top_values hold the K most likely tokens, best first, where K is the largest number
    that any row of the step asked for; a row that asked for fewer reads only its share.
    """

    values: Float32  # [n] of the token
    ranks: Int32  # [n] 1 = the most likely token
    top_ids: Int32  # [n, K]
    top_values: Float32  # [n, K]

    def lines(self, chosen: Bool | slice) -> Logprobs:
        """Some of the lines, in order."""
        return Logprobs(self.values[chosen], self.ranks[chosen], self.top_ids[chosen], self.top_values[chosen])


@dataclass(frozen=True, slots=True)
class OpCheck:
    """Whether an op gave each request alone the bits that it gave it in a batch, over all steps so far.

    backend: whose implementation it is, and on what device. num_calls: with more than one request or
    token; num_different of them differed. first_difference: where, and the two numbers.
    """

    backend: str
    num_calls: int
    num_different: int
    first_difference: str | None


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """What became of drafts since the engine started, by their place after the newest token: each [drafts] int64.

    calibration_error: mean distance between the probability that a draft is accepted as it was estimated and
        what was seen, over the checked drafts.
    """

    proposed: Int64
    checked: Int64
    accepted: Int64
    num_rows: int  # rows that had drafts to check
    calibration_error: float

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts a row that had some to check."""
        return float(self.accepted.sum()) / max(1, self.num_rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, ready for JSON."""
        counts = {name: getattr(self, name).tolist() for name in ("proposed", "checked", "accepted")}
        return counts | {
            "num_rows": self.num_rows,
            "mean_accepted": self.mean_accepted,
            "calibration_error": self.calibration_error,
        }


@dataclass(slots=True)
class StepResult:
    """What one step gave; lines are the tokens of the plan's first row with `samples`, of its second, and so on.

    num_tokens: of each such row: 1, one more for each accepted draft, or 0 for a row planned past its request's
        limit; None = 1 each. num_checked: drafts that each such row checked; None = no drafts.
    has_choice: False where the request's own parameters exclude every token; None = nowhere.
    prompt_logprobs: one line for each of the plan's `logprob_targets`.
    num_computed: tokens that passed the model; fewer than planned where fewer drafts were checked.
    wants_drafts: rows shall be planned with drafts.
    errors: why a line has no token, where it is not the logits; `is_finite` is False there too.
    """

    step: int
    token_ids: Int32  # [n]
    is_finite: Bool  # [n] False: the logits held NaN or no finite value; the token means nothing
    logprobs: Logprobs | None = None
    prompt_logits: dict[int, Float32] = field(default_factory=dict)  # row -> [counts[row], vocab]
    has_choice: Bool | None = None  # [n]
    prompt_logprobs: Logprobs | None = None
    num_computed: int = 0
    seconds: float = 0.0  # device side time of the step
    op_seconds: dict[str, float] = field(default_factory=dict)  # by kind of op, if they are timed
    op_checks: dict[str, OpCheck] = field(default_factory=dict)  # by op, if they are checked
    errors: dict[int, str] = field(default_factory=dict)
    num_tokens: Int32 | None = None  # [sampling rows], n in all
    num_checked: Int32 | None = None  # [sampling rows]
    drafts: DraftCounts | None = None
    wants_drafts: bool = False


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
    num_checked_drafts: int = 0
    num_accepted_drafts: int = 0
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
    prompt_logprobs: list[tuple[str, int, Logprobs]] = field(default_factory=list)  # id, first token's index, lines
