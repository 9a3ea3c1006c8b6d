"""From settings to a listening server, and to its end: a first SIGTERM drains, a second one is final."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from deepinfer import log
from deepinfer.checkpoint import hub
from deepinfer.config.engine import EngineConfig
from deepinfer.config.serve import KEY, ServeOptions
from deepinfer.engine.wire import Start
from deepinfer.errors import ConfigError
from deepinfer.frontend.chat import ChatEncoder
from deepinfer.frontend.defaults import default_params
from deepinfer.frontend.known_answers import KnownAnswers
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.images.room import PixelRoom
from deepinfer.serve.app import build_app
from deepinfer.serve.image_fetch import ImageFetcher
from deepinfer.serve.link import Link
from deepinfer.serve.metrics import Metrics
from deepinfer.serve.service import Service
from deepinfer.serve.supervisor import Supervisor

if TYPE_CHECKING:
    from deepinfer.serve.traces import Traces

logger = log.get(__name__)

BACKLOG = 2048


class Server(uvicorn.Server):
    """A uvicorn server that tells the service when it is being stopped."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In the main thread, at SIGTERM or SIGINT."""
        if self._service.is_draining:
            self._service.supervisor.kill()
            os._exit(128 + sig)
        self._service.is_draining = True
        self.should_exit = True


def build_service(config: EngineConfig, options: ServeOptions, *, log_level: str = "info") -> Service:
    """Everything but the engine, which `Supervisor.start` starts. Raises ConfigError or ModelError."""
    folder = hub.resolve(config.model.model, config.model.revision)
    is_dummy = config.model.load_format == "dummy" and not (folder / "tokenizer.json").exists()
    tokenizer = NoTokenizer() if is_dummy else Tokenizer(folder)
    names = options.served_model_name or (_name(config, folder),)
    metrics = Metrics(names[0])
    domains = frozenset(options.allowed_image_domain)
    fetch = ImageFetcher(domains, config.images.max_image_bytes) if domains else None
    chats = ChatEncoder(folder / "tokenizer.json", default_thinking=options.default_thinking, fetch=fetch)
    known = KnownAnswers(tokenizer, chats.parser)
    traces = _traces(options.otlp_traces_endpoint, names[0])
    capacity = config.scheduler.max_num_requests + config.scheduler.max_queue
    link = Link(metrics, known, capacity, PixelRoom(config.images.image_queue_bytes), traces)
    start = Start(config, folder, tuple(tokenizer.eos_ids) or None, log_level, options.log_json)
    return Service(
        options=options,
        names=names,
        tokenizer=tokenizer,
        chats=chats,
        known=known,
        defaults=default_params(folder),
        link=link,
        supervisor=Supervisor(start, link, options.stuck_seconds),
        metrics=metrics,
        started=int(time.time()),
        image_options=config.images,
        traces=traces,
    )


def _traces(endpoint: str | None, model: str) -> Traces | None:
    if endpoint is None:
        return None
    try:
        from deepinfer.serve.traces import Traces
    except ModuleNotFoundError as error:
        raise ConfigError(f"traces need the package {error.name}; install deepinfer with its extra `trace`") from None
    return Traces(endpoint, model)


def read_keys(options: ServeOptions) -> tuple[str, ...]:
    """The API keys, from the options or their file. Raises ConfigError."""
    if options.api_key_file is None:
        return options.api_key
    try:
        lines = Path(options.api_key_file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {options.api_key_file!r} cannot be read: {error}") from None
    if not lines or not all(KEY.fullmatch(line) for line in lines):
        raise ConfigError(f"api_key_file {options.api_key_file!r} must hold a key of printable characters on each line")
    return tuple(lines)


def serve(config: EngineConfig, options: ServeOptions, *, log_level: str = "info") -> int:
    """Serve until a signal ends it; returns the exit code. Raises ConfigError or ModelError."""
    keys = read_keys(options)
    service = build_service(config, options, log_level=log_level)
    return asyncio.run(_serve(service, keys))


async def _serve(service: Service, keys: tuple[str, ...]) -> int:
    with _listen(service.options) as listener:
        await service.supervisor.start()
        listener.listen(BACKLOG)  # from here on clients can connect
        server = Server(uvicorn_config(service, keys), service)
        host, port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d (%s)", host, port, ", ".join(service.names))
        if not keys and host not in ("127.0.0.1", "::1"):
            logger.warning("everybody who reaches %s may ask; give an api_key to change that", host)
        await server.serve(sockets=[listener])
        await service.close()
    return 0


def uvicorn_config(service: Service, keys: tuple[str, ...]) -> uvicorn.Config:
    """How uvicorn runs the application."""
    return uvicorn.Config(
        build_app(service, keys),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(service.options.drain_seconds),
    )


def _listen(options: ServeOptions) -> socket.socket:
    """The listening socket, taken before the model is loaded. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error}") from None
    return listener


def _name(config: EngineConfig, folder: Path) -> str:
    return config.model.model or folder.name
