"""LLM: the engine as a Python object, for offline use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepinfer import env
from deepinfer.answers import Answers, Start
from deepinfer.call import Call
from deepinfer.checkpoint import hub
from deepinfer.config.variables import engine_config
from deepinfer.engine.launch import launch
from deepinfer.engine.stats import EngineStats
from deepinfer.errors import RequestError
from deepinfer.frontend.defaults import default_params
from deepinfer.frontend.outputs import ChatDelta, ChatOutput, OutputDelta, RequestOutput
from deepinfer.frontend.prompt import Prompt, RequestBuilder
from deepinfer.frontend.request_ids import RequestIds
from deepinfer.frontend.samples import split_samples
from deepinfer.frontend.stream import RequestStream
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.images.prepare import ImagePreparer
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.frontend.chat import ChatEncoder, Effort, Message
    from deepinfer.frontend.chat_stream import ChatStream

Params = SamplingParams | Sequence[SamplingParams] | None


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
        self.device = engine.device
        self.image_token_id = None if engine.images is None else engine.images.token_id
        preparer = None if engine.images is None else ImagePreparer(engine.images, self.config.images)
        self._builder = RequestBuilder(
            self.tokenizer, engine.vocab_size, engine.max_model_len, engine.num_cache_tokens, preparer
        )

    # -- whole answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        multi_modal_data: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        priority: int = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: one output per prompt, in their order; with `n` above 1, see `RequestOutput.more`.

        prompts: one or a list of: a text; token ids; {"prompt": text}; {"prompt_token_ids": ids}. The last two
            may have "images", a list of paths, bytes, pictures or data URLs, one for each `<｜image｜>` in the prompt.
        multi_modal_data: the images as DeepInfer takes them, {"image_bytes": [...], "image_sizes": [...]}; for a
            list of prompts, one for each or None.
        params: for all, or one for each; None = `default_params`.
        progress: a bar on standard error; None = when it is a terminal.

        Raises RequestError when a single prompt is refused. In a list, a refused prompt has an
        output of its own with finish_reason "error", and the others are answered.
        """
        is_one = isinstance(prompts, str | bytes | Mapping) or not _is_list_of_prompts(prompts)
        items: list[Any] = [prompts] if is_one else list(prompts)
        if multi_modal_data is not None:
            items = _with_data(items, [multi_modal_data] if is_one else multi_modal_data)

        def start(prompt: Prompt, chosen: SamplingParams, request_ids: list[str]) -> list[RequestStream]:
            return self._streams(prompt, chosen, request_ids, priority)

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

        def start(conversation: Sequence[Message], chosen: SamplingParams, request_ids: list[str]) -> list[ChatStream]:
            return self._chat_streams(
                conversation, chosen, request_ids, priority, thinking=thinking, effort=effort, tools=tools,
                response_format=response_format, continue_final_message=continue_final_message,
            )  # fmt: skip

        outputs = self._answer_all(items, self._params_for(len(items), params), start, progress)
        return [_as_chat(output) for output in (_raise_if_refused(outputs) if is_one else outputs)]

    def score(self, prompt: Prompt) -> NDArray[np.float32]:
        """Logits of the model after every position of a sequence: [n, vocab] float32.

        prompt: as in `generate`; an image takes as many positions as in `RequestOutput.prompt_token_ids`.
        Every token passes every layer, whatever the replay mode. Raises RequestError.
        """
        with Call(self._client, self._ids) as call:
            request_id = call.take_id()
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            request = self._builder.build(prompt, params, request_id=request_id, wants_prompt_logits=True)
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

        With `n` above 1 the pieces of all answers come as they are made, told apart by `sample`.

        request_id: for `abort`; made up when not given. Raises RequestError at the first step.
        """
        with Call(self._client, self._ids) as call:
            (chosen,) = self._params_for(1, params)
            yield from call.deltas(self._streams(prompt, chosen, call.take_ids(chosen.n, request_id), priority))

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
            (chosen,) = self._params_for(1, params)
            request_ids = call.take_ids(chosen.n, request_id)
            yield from call.chat_deltas(self._chat_streams(messages, chosen, request_ids, priority, **options))

    # -- control

    def abort(self, request_id: str) -> bool:
        """End a request, all its answers, wherever it stands; its finish_reason is "abort". False for an unknown id."""
        return any([self._client.abort(one) for one in self._ids.answers_to(request_id)])

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

    def _streams(
        self, prompt: Prompt, params: SamplingParams, request_ids: list[str], priority: int
    ) -> list[RequestStream]:
        """One stream for each answer to a prompt."""
        request = self._builder.build(prompt, params, request_id=request_ids[0], priority=priority)
        return [
            RequestStream(one, self.tokenizer, sample=sample, asked_as=request_ids[0])
            for sample, one in enumerate(split_samples(request, request_ids))
        ]

    def _chat_streams(
        self,
        conversation: Sequence[Message],
        params: SamplingParams,
        request_ids: list[str],
        priority: int,
        **options: Any,
    ) -> list[ChatStream]:
        """The same for a conversation."""
        from deepinfer.frontend.chat_stream import ChatStream  # as above

        prompt = self._chat_encoder.encode(conversation, **{"thinking": False, **options})
        params = prompt.constrained(params, self.tokenizer.think_end_id)
        request = self._builder.build(
            prompt.token_ids, params, request_id=request_ids[0], priority=priority, images=prompt.images
        )
        return [
            ChatStream(one, self.tokenizer, prompt.parser(), sample=sample, asked_as=request_ids[0])
            for sample, one in enumerate(split_samples(request, request_ids))
        ]

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
        with Call(self._client, self._ids) as call:
            return Answers(call, start, items, params).collect(progress)


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


def _with_data(items: list[Any], data: Any) -> list[Any]:
    """Prompts with the images that stand beside them."""
    if not isinstance(data, Sequence) or len(data) != len(items):
        given = f"a list of {len(data)}" if isinstance(data, Sequence) else f"a {type(data).__name__}"
        raise RequestError(f"multi_modal_data is {given}; it must be one for each of {len(items)} prompts, or None")
    named = [item if isinstance(item, Mapping) else {_kind(item): item} for item in items]
    pairs = zip(named, data, strict=True)
    return [prompt if one is None else {**prompt, "multi_modal_data": one} for prompt, one in pairs]


def _kind(prompt: object) -> str:
    return "prompt" if isinstance(prompt, str) else "prompt_token_ids"


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
    return ChatOutput.refused(output.request_id, output.error or "")
