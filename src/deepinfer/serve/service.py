"""Service: what every endpoint works with; one object for a server."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from deepinfer import log
from deepinfer.config.engine import ImageOptions
from deepinfer.config.serve import ServeOptions
from deepinfer.engine.wire import Ready
from deepinfer.errors import EngineDeadError, RequestError, shown
from deepinfer.frontend.chat import ChatEncoder, ChatPrompt
from deepinfer.frontend.images import PromptImage
from deepinfer.frontend.known_answers import KnownAnswers
from deepinfer.frontend.prompt import Prompt, RequestBuilder
from deepinfer.frontend.request_ids import MAX_ID_CHARACTERS
from deepinfer.frontend.samples import split_samples
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.frontend.tool_choice import Protocol
from deepinfer.images.prepare import ImagePreparer
from deepinfer.messages import GenerateRequest
from deepinfer.sampling.params import SamplingParams
from deepinfer.serve import body as bodies
from deepinfer.serve import fields
from deepinfer.serve.answer import AnswerResponse, Writer
from deepinfer.serve.errors import ApiError
from deepinfer.serve.image_fetch import MAX_REQUESTS
from deepinfer.serve.link import Exchange, Link
from deepinfer.serve.metrics import Metrics
from deepinfer.serve.response_store import ResponseStore
from deepinfer.serve.supervisor import Supervisor

if TYPE_CHECKING:
    from deepinfer.serve.traces import Traces

logger = log.get(__name__)

Made = TypeVar("Made")

MAX_SALT_CHARACTERS = 1024
NUM_WORKERS = MAX_REQUESTS + 8  # threads for big bodies, also while all downloads that may run do


@dataclass
class Service:
    """The engine, the model's tokenizer and chat format, and the settings.

    names: that requests may use for the model. known: earlier answers, token for token.
    defaults: sampling parameters that the model recommends. started: seconds since 1970.
    traces: None = nobody wants them.
    """

    options: ServeOptions
    names: tuple[str, ...]
    tokenizer: Tokenizer | NoTokenizer
    chats: ChatEncoder
    known: KnownAnswers
    defaults: SamplingParams
    link: Link
    supervisor: Supervisor
    metrics: Metrics
    started: int
    image_options: ImageOptions
    traces: Traces | None = None
    is_draining: bool = False
    budget: bodies.Budget = field(default_factory=lambda: bodies.Budget(bodies.MAX_TOTAL_BYTES))
    responses: ResponseStore = field(default_factory=ResponseStore)
    _workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(NUM_WORKERS, "deepinfer-body"))
    _made: tuple[Ready, RequestBuilder] | None = field(default=None, init=False)  # the builder for these limits

    @property
    def builder(self) -> RequestBuilder:
        """Makes requests for the engine as it is now. Raises EngineDeadError before it was ever ready."""
        limits = self.link.limits
        if limits is None:
            raise EngineDeadError("the engine is not running")
        if self._made is None or self._made[0] is not limits:
            images = None if limits.images is None else ImagePreparer(limits.images, self.image_options)
            sizes = limits.vocab_size, limits.max_model_len, limits.num_cache_tokens
            self._made = limits, RequestBuilder(self.tokenizer, *sizes, images)
        return self._made[1]

    def encode(self, body: Mapping[str, Any], protocol: Protocol, **options: Any) -> ChatPrompt:
        """The prompt of a conversation; earlier answers in it have the tokens that they were made of."""
        prompt = self.chats.encode_body(body, protocol, **options)
        return dataclasses.replace(prompt, token_ids=self.known.restored(prompt.token_ids, _salt(body)))

    def request(
        self,
        body: Mapping[str, Any],
        prompt: Prompt,
        params: SamplingParams,
        *,
        images: Sequence[PromptImage] = (),
        lowers_max_tokens: bool = False,
    ) -> list[GenerateRequest]:
        """The requests for all answers to a prompt, with the body's priority and salt. Raises RequestError."""
        names = self.link.new_ids(params.n)
        made = self.builder.build(
            prompt, params, request_id=names[0], priority=body.get("priority") or 0, images=images,
            lowers_max_tokens=lowers_max_tokens,
        )  # fmt: skip
        return split_samples(dataclasses.replace(made, cache_salt=_salt(body)), names)

    @property
    def fixed_of_texts(self) -> Mapping[str, tuple[object, str]]:
        """What fields of a body with a raw text may say only, see `fields.FIXED`."""
        return {} if self.tokenizer.bos_id is None else fields.BEGUN

    async def read(self, request: Request) -> tuple[dict[str, Any], bool]:
        """The body of a request, and whether it is big. Raises ApiError."""
        data = await bodies.read_bytes(request, self.options.max_body_bytes, self.budget)
        # Images take long to decode; with an escape the word could be spelled otherwise.
        is_big = len(data) >= bodies.BIG_BYTES or b"image" in data or b"\\u" in data
        try:
            return await self.work(is_big, lambda: bodies.parse(data)), is_big
        finally:
            self.budget.give(len(data))

    async def work(self, is_big: bool, make: Callable[[], Made]) -> Made:
        """What `make` returns; beside the event loop if it may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._workers, make) if is_big else make()

    def check(
        self,
        body: Mapping[str, Any],
        own: Iterable[str],
        request: Request,
        *,
        refused: Mapping[str, str] | None = None,
        left_out: Iterable[str] = (),
        fixed: Mapping[str, tuple[object, str]] | None = None,
    ) -> None:
        """Raise ApiError or RequestError for a model that is not here, a wish that cannot be met, and (strict) for
        an unknown field.

        own, left_out: as in `fields.unknown`. refused, fixed: as in `fields.check_wishes`.
        """
        name = fields.text(body, "model")
        if name is not None and name not in self.names:
            raise ApiError(404, f"model {shown(name)} is not here; this server has {', '.join(self.names)}", "model",
                           "model_not_found")  # fmt: skip
        fields.check_wishes(body, refused or {}, fixed)
        ignored = fields.unknown(body, own, left_out)
        if ignored and self.options.strict_fields:
            raise RequestError(f"unknown field {shown(ignored[0])}; leave it out (this server is strict about fields)")
        if ignored:
            request.state.notes["ignored_fields"] = [shown(one) for one in ignored[:8]]

    def ids(self, body: Mapping[str, Any], request: Request, prefix: str) -> tuple[str, tuple[str, ...]]:
        """(the id of an answer, the names under which `/abort` finds it: of this caller only)."""
        name = fields.text(body, "request_id") or request.state.request_id
        if len(name) > MAX_ID_CHARACTERS:
            raise RequestError(f"request_id has {len(name)} characters; it must have at most {MAX_ID_CHARACTERS}")
        answer_id = f"{prefix}{secrets.token_hex(12)}"
        return answer_id, (f"{request.state.caller}/{name}", f"{request.state.caller}/{answer_id}")

    def check_count(self, count: int) -> None:
        """Raise RequestError for too many answers to one request."""
        if count > self.options.max_choices:
            raise RequestError(
                f"n is too large: the request asks for {count} answers, at most {self.options.max_choices} are given "
                "(--max-choices)"
            )

    async def close(self) -> None:
        """End the engine after the step in flight, and send the last traces."""
        await self.supervisor.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    def answer(self, exchange: Exchange, writer: Writer, *, is_stream: bool) -> AnswerResponse:
        """The response that waits for the engine."""
        return AnswerResponse(exchange, writer, is_stream=is_stream, seconds=self.options.request_seconds)


def _salt(body: Mapping[str, Any]) -> str:
    salt = fields.text(body, "cache_salt") or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise RequestError(f"cache_salt has {len(salt)} characters; it must have at most {MAX_SALT_CHARACTERS}")
    return salt
