"""The answer of one request as its tokens arrive: text, stop strings, deltas, and the whole at the end."""

from __future__ import annotations

import math
from bisect import bisect_left

from deepinfer.frontend.outputs import OutputDelta, RequestOutput, TokenLogprobs
from deepinfer.frontend.stops import StopStrings
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import Finished, FinishReason, GenerateRequest, Logprobs, StepOutput


class RequestStream:
    """Collects one request's tokens until the engine says it is finished.

    A token that ends the answer (stop_token_ids, and end-of-sequence unless ignored) is kept but
    gives no text, unless `include_stop_str_in_output`. When a stop string is found, `wants_stop`
    turns true: the caller tells the engine to finish the request, tokens that still arrive are
    dropped, and the reason becomes "stop" whatever the engine says. The text is then cut before the
    stop string (or behind it); a token stays if it has a byte of a character that stays, and so do
    all tokens before it. A stop string that ends within the first `min_tokens` tokens does not count.

    Deltas hold only what can no longer be cut: joined, they equal the final output.
    """

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer | NoTokenizer,
        *,
        sample: int = 0,
        asked_as: str | None = None,
        keeps_markup: bool = False,
    ) -> None:
        """sample: number of the answer among those to one prompt.

        asked_as: the request id that the caller knows, if it is not the request's own.
        keeps_markup: as in `Tokenizer.detokenizer`; for answers that will be parsed.
        """
        params = request.params
        self.request, self.sample = request, sample
        self._asked_as = request.request_id if asked_as is None else asked_as
        self._detokenizer = tokenizer.detokenizer(keeps_markup=keeps_markup)
        self._stops = StopStrings(params.stop, keeps_match=params.include_stop_str_in_output)
        self._end_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else tokenizer.eos_ids))
        self._finished: Finished | None = None
        self._token_ids: list[int] = []
        self._places_without: dict[int, int] = {}  # so many tokens from the start on are not this one
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self._num_taken_prompt = 0
        self._texts: list[str] = []
        self._num_chars = 0  # of text that stays
        self._num_taken_texts = 0
        self._num_taken_tokens = 0
        self._is_taken_to_end = False

    @property
    def wants_stop(self) -> bool:
        """A stop string was found, but the engine has not finished the request yet."""
        return self._stops.match is not None and self._finished is None

    @property
    def is_finished(self) -> bool:
        return self._finished is not None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended, once the engine has finished the request."""
        return None if self._finished is None else self._ending()[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, those that may still be cut included."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The answer so far, tokens that may still be cut included."""
        return self._token_ids

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the engine did not have to compute, once it has finished the request."""
        return 0 if self._finished is None else self._finished.num_cached_tokens

    def num_tokens_before(self, token_id: int) -> int:
        """Tokens of the answer before the first one with this id; all of them if none has it."""
        tokens, place = self._token_ids, self._places_without.get(token_id, 0)
        while place < len(tokens) and tokens[place] != token_id:
            place += 1
        self._places_without[token_id] = place
        return place

    @property
    def refusal(self) -> str | None:
        """Why the request never ran, once that is known."""
        ended = self._finished
        return ended.error if ended is not None and ended.reason == "error" and ended.times.scheduled is None else None

    def add_line(self, output: StepOutput, line: int) -> None:
        """Take the request's token from a line of the engine's output."""
        token_id = int(output.token_ids[line])
        wanted = self.request.params.logprobs
        if wanted is None or output.logprobs is None:
            self.add(token_id)
        else:
            self.add(token_id, token_logprobs(output.logprobs, line, token_id, wanted))

    def add_prompt_lines(self, start: int, logprobs: Logprobs) -> None:
        """Take log-probabilities of the prompt's tokens from number `start` on."""
        wanted = self.request.params.prompt_logprobs
        assert wanted is not None and self._prompt_logprobs is not None, "nobody asked for log-probabilities"
        assert start == len(self._prompt_logprobs), f"prompt token {start} came, {len(self._prompt_logprobs)} was due"
        for line, token_id in enumerate(self.request.token_ids[start : start + len(logprobs.values)].tolist()):
            self._prompt_logprobs.append(token_logprobs(logprobs, line, token_id, wanted))

    def add(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take the next token; ignored once the answer is complete."""
        if self._stops.match is not None or self._finished is not None:
            return
        self._token_ids.append(token_id)
        if self._logprobs is not None:
            assert logprobs is not None, f"{self.request.request_id} asked for log-probabilities"
            self._logprobs.append(logprobs)
        params = self.request.params
        if token_id in self._end_ids and not params.include_stop_str_in_output:
            self._detokenizer.add_silent()
        else:
            may_end = len(self._token_ids) > params.min_tokens
            self._keep(self._stops.add(self._detokenizer.add(token_id), may_end=may_end))

    def finish(self, finished: Finished) -> None:
        """The engine is done with the request, for whatever reason."""
        if self._finished is not None:
            return
        may_end = len(self._token_ids) > self.request.params.min_tokens
        self._keep(self._stops.add(self._detokenizer.flush(), may_end=may_end))
        self._keep(self._stops.flush())
        self._finished = finished

    def take(self) -> OutputDelta | None:
        """What is new since the last call, None if nothing is; the last delta has the finish reason."""
        first, end = self._num_taken_tokens, self._num_safe_tokens()
        texts = self._texts[self._num_taken_texts :]
        is_end = self.is_finished and not self._is_taken_to_end
        if end <= first and not texts and not is_end:
            return None
        self._num_taken_tokens, self._num_taken_texts = max(first, end), len(self._texts)
        self._is_taken_to_end = self.is_finished
        reason, stop_reason, error = self._ending() if is_end else (None, None, None)
        prompt_logprobs = None
        if self._prompt_logprobs is not None and self._num_taken_prompt < len(self._prompt_logprobs):
            prompt_logprobs = self._prompt_logprobs[self._num_taken_prompt :]
            self._num_taken_prompt = len(self._prompt_logprobs)
        return OutputDelta(
            request_id=self._asked_as,
            sample=self.sample,
            prompt_logprobs=prompt_logprobs,
            text="".join(texts),
            token_ids=self._token_ids[first:end],
            logprobs=None if self._logprobs is None else self._logprobs[first:end],
            finish_reason=reason,
            stop_reason=stop_reason,
            error=error,
        )

    def output(self) -> RequestOutput:
        """The whole answer, once the request is finished."""
        assert self._finished is not None, f"{self.request.request_id} is not finished"
        reason, stop_reason, error = self._ending()
        times, end = self._finished.times, self._num_safe_tokens()
        return RequestOutput(
            request_id=self._asked_as,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            prompt_token_ids=self.request.token_ids.tolist(),
            text="".join(self._texts),
            token_ids=self._token_ids[:end],
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if self._logprobs is None else self._logprobs[:end],
            error=error,
            num_cached_tokens=self._finished.num_cached_tokens,
            num_generated_tokens=len(self._token_ids),
            num_checked_drafts=self._finished.num_checked_drafts,
            num_accepted_drafts=self._finished.num_accepted_drafts,
            queue_seconds=None if times.scheduled is None else times.scheduled - times.arrival,
            first_token_seconds=None if times.first_token is None else times.first_token - times.arrival,
            total_seconds=times.finished - times.arrival,
        )

    def _keep(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._num_chars += len(text)

    def _num_safe_tokens(self) -> int:
        """Tokens that no stop string can cut any more."""
        may_cut = self._stops.match is not None or not self.is_finished
        if self.request.params.stop and may_cut:
            return bisect_left(self._detokenizer.starts, self._num_chars)
        return len(self._token_ids)

    def _ending(self) -> tuple[FinishReason, str | int | None, str | None]:
        assert self._finished is not None
        if self._stops.match is not None:
            return "stop", self._stops.match, None
        return self._finished.reason, self._finished.stop_token, self._finished.error


def token_logprobs(logprobs: Logprobs, line: int, token_id: int, wanted: int) -> TokenLogprobs:
    """One line of a step's log-probabilities, with as many alternatives as the request wanted and are possible."""
    ids, values = logprobs.top_ids[line, :wanted].tolist(), logprobs.top_values[line, :wanted].tolist()
    top = [(token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf]
    return TokenLogprobs(token_id, float(logprobs.values[line]), int(logprobs.ranks[line]), top)
