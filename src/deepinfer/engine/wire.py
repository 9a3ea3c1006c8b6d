"""What a server and its engine process say to each other: pickled messages over one socket pair, no torch.

Start              server -> engine     once
Ready | Failed     engine -> server     the answer to it
Submit, Finish     server -> engine     one request each
Steps              engine -> server     what all requests got since the last message
Refused            engine -> server     a request that was not queued
Alive              engine -> server     each second, unless the engine has requests and does nothing with them
Failed             engine -> server     the engine stopped; the process ends
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deepinfer.config.engine import EngineConfig
from deepinfer.engine.stats import EngineStats
from deepinfer.images.geometry import ImageGeometry
from deepinfer.messages import FinishReason, GenerateRequest, StepOutput

MAX_STEPS = 64  # outputs that wait for the server on each side of the socket; then the engine waits


@dataclass(frozen=True, slots=True)
class Start:
    """What to load. eos_ids: tokens that end an answer; the model configuration's when None."""

    config: EngineConfig
    folder: Path
    eos_ids: tuple[int, ...] | None
    log_level: str = "info"
    log_json: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine runs; the limits that requests are checked against."""

    max_model_len: int
    vocab_size: int
    num_cache_tokens: int
    images: ImageGeometry | None
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine cannot start, or stopped. is_refusal: the options, the model or the weights are to blame."""

    error: str
    is_refusal: bool = False


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Finish:
    """End a request. Unknown ids are ignored: it may have ended meanwhile."""

    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Steps:
    """One message a step; several steps when the server was slower. stats: as they stand after the last one."""

    outputs: list[StepOutput]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Refused:
    request_id: str
    error: str
    is_queue_full: bool


@dataclass(frozen=True, slots=True)
class Alive:
    """The core went on since the last one, or has no request."""


Command = Submit | Finish
Report = Ready | Failed | Steps | Refused | Alive
