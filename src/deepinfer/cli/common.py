"""What the commands share: flags of the engine and of sampling, the model they open, progress bars."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from tqdm import tqdm

from deepinfer import log
from deepinfer.config import fields, flags
from deepinfer.config.engine import EngineConfig
from deepinfer.errors import ConfigError
from deepinfer.sampling.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

Item = TypeVar("Item")
FIRST_ORDINARY_TOKEN = 3  # ids below are begin, end and padding


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every engine option."""
    for title, options in fields.read_groups(EngineConfig).items():
        flags.add_flags(parser, title, options)
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="default: warning"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every sampling parameter."""
    flags.add_flags(parser, "Sampling; the model's own settings where not given", fields.read_options(SamplingParams))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given as flags."""
    options = [option for group in fields.read_groups(EngineConfig).values() for option in group]
    return flags.given(args, options)


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given as flags."""
    return flags.given(args, fields.read_options(SamplingParams))


def open_llm(args: argparse.Namespace, **options: Any) -> LLM:
    """The engine that the flags describe, with `options` over them; torch is loaded here and not before."""
    from deepinfer.llm import LLM

    log.setup(args.log_level)
    return LLM(**engine_options(args) | options)


def describe(llm: LLM) -> dict[str, Any]:
    """What figures of this engine belong to."""
    model = llm.config.model
    return {"model": model.model or "deepinfer-nano", "device": llm.device, "precision": model.precision}


def random_tokens(random: np.random.Generator, llm: LLM, count: int) -> list[int]:
    """A prompt of ordinary tokens, among which none stands for an image."""
    tokens = random.integers(FIRST_ORDINARY_TOKEN, llm.vocab_size, count)
    tokens[tokens == llm.image_token_id] = FIRST_ORDINARY_TOKEN
    return list(map(int, tokens))


def read_text(path: str) -> str:
    """The text of a file. Raises ConfigError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterable[Item]:
    """The items behind a progress bar on a terminal, and without one elsewhere."""
    bar: Iterable[Item] = tqdm(items, desc=description, total=total, disable=not sys.stderr.isatty(), leave=False)
    return bar


def count(text: str) -> int:
    """A flag's whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def counts(text: str) -> tuple[int, ...]:
    """A flag's whole numbers, 1 or more each, with commas between them."""
    return tuple(count(word.strip()) for word in text.split(","))


def share(text: str) -> float:
    """A flag's number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value
