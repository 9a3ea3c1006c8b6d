"""LLM: the engine as a Python object, for offline use."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deepinfer import env
from deepinfer.call import Call
from deepinfer.checkpoint import hub
from deepinfer.config.variables import engine_config
from deepinfer.engine.launch import launch
from deepinfer.engine.stats import EngineStats
from deepinfer.errors import QueueFullError, RequestError
from deepinfer.frontend.defaults import default_params
from deepinfer.frontend.outputs import ChatDelta, ChatOutput, OutputDelta, RequestOutput
from deepinfer.frontend.prompt import Prompt, RequestBuilder
from deepinfer.frontend.request_ids import RequestIds
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.frontend.chat import ChatEncoder, Effort, Message
    from deepinfer.frontend.chat_stream import ChatStream

Params = SamplingParams | Sequence[SamplingParams] | None
Start = Callable[[Any, SamplingParams, str], RequestStream]
QUEUE_POLL_SECONDS = 0.005


class LLM:
    """A model, loaded and running; close it, or use it as a context manager.

    What is not closed ends when nobody holds the object any more, or at the interpreter's exit.

    model: checkpoint folder or hub id; None = the small model that ships with the package.
    options: every field of `EngineConfig` by its name, as in `LLM(precision="float32",
        max_num_requests=8)`. What is not given comes from DEEPINFER_ variables, then defaults.

    Calls from several threads share the engine. The process is left alone: no global seeds,
    signal handlers, thread settings or environment changes.

    Raises ConfigError, ModelError or CheckpointError for what cannot be run.
    """

    def __init__(self, model: str | Path | None = None, **options: Any):
        if model is not None:
            options["model"] = str(model)
        self.config = engine_config(options, env.deepinfer_variables())
        folder = hub.resolve(self.config.model.model, self.config.model.revision)
        self.tokenizer = _load_tokenizer(folder, is_dummy=self.config.model.load_format == "dummy")
        self.default_params = default_params(folder)
        self._folder = folder
        self._ids = RequestIds()
        engine = launch(self.config, folder, self.tokenizer.eos_ids or None)
        self._client = engine.client
        weakref.finalize(self, engine.client.close_unused)  # at exit, or when nobody holds this object any more
        self.vocab_size, self.max_model_len = engine.vocab_size, engine.max_model_len
        self._builder = RequestBuilder(self.tokenizer, engine.vocab_size, engine.max_model_len, engine.num_cache_tokens)

    # -- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: one output per prompt, in their order.

        prompts: one or a list of: a text; token ids; {"prompt": text}; {"prompt_token_ids": ids}.
        params: for all, or one for each; None = `default_params`.
        progress: a bar on standard error; None = when it is a terminal.

        Raises RequestError when a single prompt is refused. In a list, a refused prompt has an
        output of its own with finish_reason "error", and the others are answered.
        """
        is_one = isinstance(prompts, str | bytes | Mapping) or not _is_list_of_prompts(prompts)
        items: list[Any] = [prompts] if is_one else list(prompts)

        def start(prompt: Prompt, chosen: SamplingParams, request_id: str) -> RequestStream:
            request = self._builder.build(prompt, chosen, request_id=request_id, priority=priority)
            return RequestStream(request, self.tokenizer)

        outputs = self._answer_all(items, self._params_for(len(items), params), start, progress)
        return _raise_if_refused(outputs) if is_one else outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        thinking: bool = False,
        effort: Effort | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        response_format: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[ChatOutput]:
        """Answer one conversation or a list of them; see `ChatEncoder.encode` for messages and options.

        Refusals as in `generate`.
        """
        is_one = not _is_list_of_conversations(messages)
        items: list[Any] = [messages] if is_one else list(messages)

        def start(conversation: Sequence[Message], chosen: SamplingParams, request_id: str) -> ChatStream:
            return self._chat_stream(
                conversation, chosen, request_id, priority, thinking=thinking, effort=effort, tools=tools,
                response_format=response_format, continue_final_message=continue_final_message,
            )  # fmt: skip

        outputs = self._answer_all(items, self._params_for(len(items), params), start, progress)
        return [_as_chat(output) for output in (_raise_if_refused(outputs) if is_one else outputs)]

    def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of the model after every position of a sequence: [n, vocab] float32.

        Every token passes every layer, whatever the replay mode. Raises RequestError.
        """
        with Call(self._client, self._ids) as call:
            request_id = call.take_id()
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            request = self._builder.build(token_ids, params, request_id=request_id, wants_prompt_logits=True)
            stream = RequestStream(request, self.tokenizer)
            call.submit(stream)
            scores = np.empty((len(request.token_ids), self.vocab_size), dtype=np.float32)
            while not stream.is_finished:
                for owner, start, logits in call.wait().prompt_logits:
                    if owner == request_id:
                        scores[start : start + len(logits)] = logits
        output = stream.output()
        if output.finish_reason in ("error", "abort"):
            raise RequestError(output.error or f"request {request_id!r} was aborted; its logits are not complete")
        return scores

    # -- answers while they are written

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> Iterator[OutputDelta]:
        """Continue one prompt piece by piece; leaving the loop early aborts the request.

        request_id: for `abort`; made up when not given. Raises RequestError at the first step.
        """
        with Call(self._client, self._ids) as call:
            taken = call.take_id(request_id)
            (chosen,) = self._params_for(1, params)
            request = self._builder.build(prompt, chosen, request_id=taken, priority=priority)
            yield from call.deltas(RequestStream(request, self.tokenizer))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Iterator[ChatDelta]:
        """Answer one conversation piece by piece; options as in `chat`, the rest as in `stream`."""
        with Call(self._client, self._ids) as call:
            taken = call.take_id(request_id)
            (chosen,) = self._params_for(1, params)
            stream = self._chat_stream(messages, chosen, taken, priority, **options)
            yield from call.chat_deltas(stream)

    # -- control

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands; its finish_reason is "abort". False for an unknown id."""
        return self._client.abort(request_id)

    def stats(self) -> EngineStats:
        """Counters of the engine as they stand now."""
        return self._client.stats()

    def close(self) -> None:
        """Stop the engine; requests that still run fail with EngineDeadError."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    @cached_property
    def _chat_encoder(self) -> ChatEncoder:
        from deepinfer.frontend.chat import ChatEncoder  # raw prompts must not need the chat package

        return ChatEncoder(self._folder / "tokenizer.json")

    def _chat_stream(
        self, conversation: Sequence[Message], params: SamplingParams, request_id: str, priority: int, **options: Any
    ) -> ChatStream:
        from deepinfer.frontend.chat_stream import ChatStream  # as above

        prompt = self._chat_encoder.encode(conversation, **{"thinking": False, **options})
        params = prompt.constrained(params, self.tokenizer.think_end_id)
        request = self._builder.build(prompt.token_ids, params, request_id=request_id, priority=priority)
        return ChatStream(request, self.tokenizer, prompt.parser())

    def _params_for(self, count: int, params: Params) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self.default_params if params is None else params] * count
        if not isinstance(params, Sequence) or len(params) != count:
            given = f"a list of {len(params)}" if isinstance(params, Sequence) else f"a {type(params).__name__}"
            raise RequestError(f"params is {given}; it must be one SamplingParams, or one for each of {count} prompts")
        return [self.default_params if one is None else one for one in params]

    def _answer_all(
        self, items: list[Any], params: list[SamplingParams], start: Start, progress: bool | None
    ) -> list[RequestOutput]:
        """One output per item, in order; items wait here while the engine's queue is full."""
        outputs: dict[int, RequestOutput] = {}
        running: dict[str, tuple[int, RequestStream]] = {}
        has_bar = sys.stderr.isatty() and len(items) > 1 if progress is None else progress
        with Call(self._client, self._ids) as call, tqdm(total=len(items), disable=not has_bar, unit="prompt") as bar:
            ready = _streams(call, zip(items, params, strict=True), start, outputs)
            entry = next(ready, None)
            while entry is not None or running:
                while entry is not None and _submit(call, entry, running, outputs):
                    entry = next(ready, None)
                if running:
                    for ended in call.wait().finished:
                        if ended.request_id in running:
                            index, stream = running.pop(ended.request_id)
                            outputs[index] = stream.output()
                elif entry is not None:  # the queue is full of other callers' requests
                    time.sleep(QUEUE_POLL_SECONDS)
                bar.update(len(outputs) - bar.n)
        return [outputs[index] for index in range(len(items))]


def _streams(
    call: Call,
    items: Iterable[tuple[Any, SamplingParams]],
    start: Start,
    outputs: dict[int, RequestOutput],
) -> Iterator[tuple[int, RequestStream]]:
    """The items as streams to submit, one when it is asked for; refusals go to `outputs`."""
    for index, (item, params) in enumerate(items):
        request_id = call.take_id()
        try:
            stream = start(item, params, request_id)
        except RequestError as error:
            outputs[index] = RequestOutput.refused(request_id, str(error))
        else:
            yield index, stream


def _submit(
    call: Call,
    entry: tuple[int, RequestStream],
    running: dict[str, tuple[int, RequestStream]],
    outputs: dict[int, RequestOutput],
) -> bool:
    """Move a stream into the engine, or its refusal to `outputs`; False when the queue is full."""
    index, stream = entry
    request_id = stream.request.request_id
    try:
        call.submit(stream)
        running[request_id] = entry
    except QueueFullError:
        return False
    except RequestError as error:
        outputs[index] = RequestOutput.refused(request_id, str(error))
    return True


def _load_tokenizer(folder: Path, *, is_dummy: bool) -> Tokenizer | NoTokenizer:
    if is_dummy and not (folder / "tokenizer.json").exists():
        return NoTokenizer()
    return Tokenizer(folder)


def _is_list_of_prompts(prompts: object) -> bool:
    """Whether this is a list of prompts rather than one prompt: it does not begin with a number, and one fits."""
    if not isinstance(prompts, Sequence | np.ndarray) or (isinstance(prompts, np.ndarray) and prompts.ndim == 0):
        return False
    if len(prompts) == 0 or isinstance(prompts[0], Number):
        return len(prompts) == 0
    return any(isinstance(prompt, str | bytes | Mapping | Sequence | np.ndarray) for prompt in prompts)


def _is_list_of_conversations(messages: object) -> bool:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    return is_list and len(messages) > 0 and not isinstance(messages[0], Mapping)  # type: ignore[arg-type, index]


def _raise_if_refused(outputs: list[RequestOutput]) -> list[RequestOutput]:
    if outputs[0].is_refused:
        raise RequestError(outputs[0].error)
    return outputs


def _as_chat(output: RequestOutput) -> ChatOutput:
    """A refused conversation has no stream, so its output is made a chat output here."""
    if isinstance(output, ChatOutput):
        return output
    return ChatOutput(
        request_id=output.request_id,
        prompt_token_ids=[],
        text="",
        token_ids=[],
        finish_reason="error",
        error=output.error,
    )
