"""A server as users start it, with the engine in a process of its own, and what tests ask of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import anthropic
import httpx2 as httpx
import openai
import uvicorn

from deepinfer.config.engine import EngineConfig
from deepinfer.config.serve import ServeOptions
from deepinfer.serve.run import build_service, uvicorn_config
from waiting import PATIENCE, wait_until

ENGINE = {"max_num_requests": 16, "num_blocks": 128, "num_threads": 1}


class Running:
    """A server in a thread. service: may only be read from here."""

    def __init__(self, engine: dict | None = None, keys: tuple[str, ...] = (), **options):
        config = EngineConfig.from_options(ENGINE | (engine or {}))
        self.service = build_service(config, ServeOptions(port=0, **options), log_level="error")
        self._config = uvicorn_config(self.service, keys)
        self._server = uvicorn.Server(self._config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.loop = None
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive())
        assert self._thread.is_alive(), "the server did not start"
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self._config.port = 0
        await self.service.supervisor.start()
        await self._server.serve()
        await self.service.close()

    def close(self):
        self.http.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def openai(self, key: str = "any", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, **options)

    def anthropic(self, key: str = "any") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def events(self, path: str, **body) -> list:
        """The data of each event of a stream; [DONE] as it is."""
        with self.http.stream("POST", path, json={"stream": True} | body) as response:
            assert response.status_code == 200, response.read()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def is_idle(self) -> bool:
        stats = self.service.link.stats
        is_free = stats is not None and stats.num_running == 0 and stats.num_free_blocks == stats.num_blocks
        return is_free and self.service.link.num_requests == 0


@contextlib.contextmanager
def running(*args, **options) -> Iterator[Running]:
    server = Running(*args, **options)
    try:
        yield server
    finally:
        server.close()
