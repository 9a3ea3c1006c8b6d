"""EngineConfig: every setting of an engine, declared once; flags, variables and docs follow.

A field's metadata holds its help text and, where DeepInfer has a variable for it, that name.
The groups are composed, frozen and checked at construction. What is found at run time (blocks
that fit in memory) does not belong here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer.errors import ConfigError, shown

Precision = Literal["exact", "float32", "fast"]
DeviceName = Literal["auto", "cpu", "cuda", "null"]
MAX_COUNT = 2**31 - 1  # counts, ids and positions are int32
MAX_THREADS = 1024
MAX_BYTES = 2**63 - 1
LoadFormat = Literal["auto", "dummy"]
ReplayMode = Literal["full", "bounded"]
DraftAcceptance = Literal["coupled", "rejection"]


def option(default: Any, help_text: str, *, variable: str | None = None) -> Any:
    """A settings field: default, help text, and the DEEPINFER_ variable that also sets it."""
    return field(default=default, metadata={"help": help_text, "variable": variable})


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how its numbers are computed."""

    model: str | None = option(
        None, "checkpoint folder or hub id; the small model that ships with the package when not given",
        variable="DEEPINFER_HF_MODEL_DIR",
    )  # fmt: skip
    revision: str | None = option(None, "hub revision (branch, tag or commit)")
    load_format: LoadFormat = option("auto", "auto: read the checkpoint; dummy: healthy random weights")
    layers: tuple[int, ...] | None = option(
        None, "run only these layers of the checkpoint (tests of full-width layers), as in 0,2,20"
    )
    max_model_len: int | None = option(None, "longest prompt + answer in tokens; the model's own limit when not given")
    precision: Precision = option(
        "fast",
        "exact: all roundings of the released reference; float32: none but the caches'; fast: those of the caches and "
        "of fp8 inputs, and the backend's choice of order",
    )
    device: DeviceName = option(
        "auto", "where the model runs; null computes nothing (engine tests)", variable="DEEPINFER_ACCELERATOR"
    )
    num_threads: int | None = option(
        None, "threads that compute on a CPU, one for each core up to 4 when not given (or OMP_NUM_THREADS); they sleep "
        "between steps, and no result depends on their number",
    )  # fmt: skip
    decoder_replay: ReplayMode = option(
        "full", "full: every prompt token passes every layer; bounded: only the last ones pass the decoder half",
        variable="DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
    )  # fmt: skip
    replay_keep_tokens: int = option(
        140, "prompt tokens that pass the decoder half when decoder_replay is bounded",
        variable="DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
    )  # fmt: skip
    enforce_eager: bool = option(
        False, "launch the kernels of decode steps one by one, where the Hopper ops would replay captured graphs",
        variable="DEEPINFER_ENFORCE_EAGER",
    )  # fmt: skip
    batch_invariant: bool = option(
        False, "refuse to run unless a request's logits never depend on the rest of the batch, bit for bit",
        variable="DEEPINFER_BATCH_INVARIANT",
    )  # fmt: skip
    time_ops: bool = option(False, "measure the time of each kind of op, which slows the engine down")
    check_ops: bool = option(
        False, "run each op for every request alone too, compare bits and count differences; several times slower"
    )

    def __post_init__(self) -> None:
        _one_of(self, "load_format", ("auto", "dummy"))
        _one_of(self, "precision", ("exact", "float32", "fast"))
        _one_of(self, "device", ("auto", "cpu", "cuda", "null"))
        _at_least(self, "num_threads", 1, high=MAX_THREADS)
        _one_of(self, "decoder_replay", ("full", "bounded"))
        _at_least(self, "replay_keep_tokens", 1)
        _at_least(self, "max_model_len", 2)
        for name in ("enforce_eager", "batch_invariant", "time_ops", "check_ops"):
            _true_or_false(self, name)
        if self.time_ops and self.check_ops:
            raise ConfigError(
                "time_ops and check_ops are both true, but checks take time of their own; give one of them"
            )
        if self.layers is not None and not _are_layers(self.layers):
            raise ConfigError(
                f"layers is {shown(self.layers)}; it must be ascending layer numbers from 0 on, as in 0,2,20"
            )


@dataclass(frozen=True)
class CacheOptions:
    """How much memory the caches take."""

    kv_cache_bytes: int | None = option(None, "bytes for cache blocks; chosen from free memory when not given")
    num_blocks: int | None = option(None, "cache blocks, instead of kv_cache_bytes (one more is kept for padding)")

    def __post_init__(self) -> None:
        _at_least(self, "kv_cache_bytes", 1, high=MAX_BYTES)
        _at_least(self, "num_blocks", 1)
        if self.kv_cache_bytes is not None and self.num_blocks is not None:
            raise ConfigError("kv_cache_bytes and num_blocks say the same thing in two ways; give one of them")


@dataclass(frozen=True)
class SchedulerOptions:
    """How requests share the steps."""

    max_num_requests: int = option(64, "requests that run at the same time")
    max_step_tokens: int | None = option(
        None, "tokens in one step, prompts and answers together; when not given 512 on a CPU and 2048 elsewhere, or "
        "more where that does not hold all running requests and the largest image",
    )  # fmt: skip
    max_chunk_tokens: int | None = option(
        None, "most prompt tokens of one request in one step; max_step_tokens when not given"
    )
    max_prefill_tokens: int | None = option(
        None, "prompt tokens of all requests in one step, or one image if that is larger; fewer make running answers wait "
        "less for new prompts; when not given 128 on a CPU (256 with AMX or AVX512-BF16), where more are hardly faster, "
        "and max_step_tokens elsewhere",
    )  # fmt: skip
    max_queue: int = option(4096, "requests that may wait; more are refused")
    async_scheduling: bool = option(True, "plan the next step while the current one runs")

    def __post_init__(self) -> None:
        for name in ("max_num_requests", "max_step_tokens", "max_chunk_tokens", "max_prefill_tokens", "max_queue"):
            _at_least(self, name, 1)
        _true_or_false(self, "async_scheduling")
        if self.max_step_tokens is not None and self.max_step_tokens < self.max_num_requests:
            raise ConfigError(
                f"max_step_tokens is {self.max_step_tokens} but must be at least max_num_requests "
                f"({self.max_num_requests}), so that every running request can take a token in a step"
            )


@dataclass(frozen=True)
class SpeculateOptions:
    """Speculative decoding."""

    num_draft_tokens: int | None = option(
        None, "tokens drafted per request and step, 0 = none; as many as the checkpoint's draft head makes when not given",
        variable="DEEPINFER_USE_NEXTN_DECODE",
    )  # fmt: skip
    draft_scheduling: bool = option(
        True, "check only drafts that are worth their time, by confidence and measured step times (precision fast); "
        "false: all of them",
        variable="DEEPINFER_ENABLE_MTP_VARLEN",
    )  # fmt: skip
    draft_acceptance: DraftAcceptance = option(
        "coupled", "coupled: a draft is kept if it equals what would be drawn without it, so texts do not depend on "
        "drafts; rejection: kept by the ratio of probabilities, which changes texts but not their distribution",
    )  # fmt: skip

    def __post_init__(self) -> None:
        _at_least(self, "num_draft_tokens", 0)
        _true_or_false(self, "draft_scheduling")
        _one_of(self, "draft_acceptance", ("coupled", "rejection"))


@dataclass(frozen=True)
class ImageOptions:
    """Images in prompts."""

    max_images: int = option(64, "images in one prompt")
    max_image_bytes: int = option(20 * 2**20, "bytes of one image file")
    max_image_pixels: int = option(2**25, "pixels of one image, checked before it is decoded")
    image_queue_bytes: int = option(
        2**30, "prepared pixels (3 bytes each) of all requests that wait or run; more are refused"
    )
    image_cache_bytes: int = option(
        2**29, "embeddings of encoded images; those of waiting prompts are kept, of others the last used"
    )
    max_encode_patches: int = option(
        16384, "patches encoded at a time beside the steps; an image that has more is encoded alone"
    )

    def __post_init__(self) -> None:
        _at_least(self, "max_images", 0)
        for name in ("max_image_bytes", "max_image_pixels", "max_encode_patches"):
            _at_least(self, name, 1)
        for name in ("image_queue_bytes", "image_cache_bytes"):
            _at_least(self, name, 1, high=MAX_BYTES)


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    speculate: SpeculateOptions = field(default_factory=SpeculateOptions)
    images: ImageOptions = field(default_factory=ImageOptions)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """From flat option names, as `LLM(**options)` and the command line give them.

        Raises ConfigError for an unknown name (with the nearest valid one) or a refused value.
        """
        groups = {}
        for group in dataclasses.fields(cls):
            kind: Any = group.default_factory
            names = [spec.name for spec in dataclasses.fields(kind)]
            groups[group.name] = kind(**{name: options[name] for name in names if name in options})
        known = [spec.name for spec in declared()]
        for name in options:
            if name not in known:
                raise unknown_option(name, known)
        return cls(**groups)


def declared() -> tuple[dataclasses.Field[Any], ...]:
    """Every option of every group, in order."""
    kinds: list[Any] = [group.default_factory for group in dataclasses.fields(EngineConfig)]
    return tuple(spec for kind in kinds for spec in dataclasses.fields(kind))


def unknown_option(name: str, known: list[str]) -> ConfigError:
    """The error for a name that no option has, with the nearest valid one."""
    import difflib

    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
    return ConfigError(f"unknown option {name!r}; {hint}")


def _one_of(options: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(options, name)
    if value not in allowed:
        raise ConfigError(f"{name} is {shown(value)}; it must be one of {', '.join(allowed)}")


def _true_or_false(options: object, name: str) -> None:
    value = getattr(options, name)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; it must be true or false")


def _are_layers(value: object) -> bool:
    if not isinstance(value, tuple | list) or not value or not all(type(layer) is int for layer in value):
        return False
    return list(value) == sorted(set(value)) and value[0] >= 0


def _at_least(options: object, name: str, low: int, *, high: int = MAX_COUNT) -> None:
    value = getattr(options, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} is {shown(value)}; it must be a whole number")
    if value < low:
        raise ConfigError(f"{name} is {shown(value)}; it must be at least {low}")
    if value > high:
        raise ConfigError(f"{name} is {shown(value)}; it must be at most {high}")
