"""ServeOptions: every setting of the HTTP server; flags, variables and docs follow, as for the engine's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer.config.engine import option
from deepinfer.errors import ConfigError, shown

Effort = Literal["low", "high", "xhigh", "max"]
MIN_STUCK_SECONDS = 4  # an engine tells each second that it lives
MAX_PORT = 2**16 - 1
NAME = re.compile(r"[\x21-\x7e]{1,256}")
DOMAIN = re.compile(r"[a-z0-9.-]{1,253}(:[0-9]{1,5})?")
KEY = re.compile(r"[\x21-\x7e]{1,1024}")
TEXTS = {"served_model_name": NAME, "api_key": KEY, "allowed_origin": NAME, "allowed_image_domain": DOMAIN}


@dataclass(frozen=True)
class ServeOptions:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all, and then give an api_key")
    port: int = option(8000, "TCP port to listen on; 0 = any free one")
    served_model_name: tuple[str, ...] = option((), "names that requests may use for the model; the first one is told")
    api_key: tuple[str, ...] = option((), "a key that clients must send; none = everybody may ask")
    api_key_file: str | None = option(None, "a file with one key a line, instead of api_key")
    allowed_origin: tuple[str, ...] = option((), "a web origin whose pages may ask (CORS), or * for all")
    allowed_image_domain: tuple[str, ...] = option(
        (), "a host that images in requests may be downloaded from; none = images come as data URLs only"
    )
    max_body_bytes: int = option(2**25, "largest request body")
    max_choices: int = option(128, "most answers to one request: its prompts times n")
    request_seconds: float = option(3600.0, "time after which a request is ended")
    drain_seconds: float = option(60.0, "time that running requests have to end when the server is told to stop")
    stuck_seconds: float = option(
        300.0, "an engine that does nothing for so long, though it has requests, is killed and started again; "
        "longer than its longest step",
    )  # fmt: skip
    default_thinking: bool = option(True, "think first, where a request does not say")
    default_effort: Effort | None = option(None, "how much to think, where a request does not say")
    stop_in_thinking: bool = option(False, "stop strings of a chat also end its thinking")
    strict_fields: bool = option(False, "refuse a request with an unknown field, instead of a note in the log")
    otlp_traces_endpoint: str | None = option(
        None, "URL of an OpenTelemetry collector that takes traces (OTLP over HTTP), as in "
        "http://localhost:4318/v1/traces; none = no traces",
    )  # fmt: skip
    log_json: bool = option(False, "write the log as one JSON object a line")

    def __post_init__(self) -> None:
        for name in ("default_thinking", "stop_in_thinking", "strict_fields", "log_json"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; it must be true or false")
        for name, low, high in (("port", 0, MAX_PORT), ("max_body_bytes", 1024, 2**31), ("max_choices", 1, 4096)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {shown(value)}; it must be a whole number from {low} to {high}")
        for name, least in (("request_seconds", 0), ("drain_seconds", 0), ("stuck_seconds", MIN_STUCK_SECONDS)):
            _check_seconds(name, getattr(self, name), least)
        for name, rule in TEXTS.items():
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(one, str) and rule.fullmatch(one) for one in values):
                told = (
                    "host names in small letters" if rule is DOMAIN else "texts of printable characters without spaces"
                )
                raise ConfigError(f"{name} must be {told}")  # without the value, which may be a secret
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not (isinstance(endpoint, str) and re.match("https?://[^/]", endpoint)):
            raise ConfigError(f"otlp_traces_endpoint is {shown(endpoint)}; it must be a URL of http or https")
        if self.default_effort not in (None, "low", "high", "xhigh", "max"):
            raise ConfigError(
                f"default_effort is {shown(self.default_effort)}; it must be one of low, high, xhigh, max"
            )
        if self.api_key and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file are two ways to give keys; give one of them")


def _check_seconds(name: str, value: Any, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least < value <= 10**7:
        raise ConfigError(f"{name} is {shown(value)}; it must be a number above {least}, at most {10**7}")
