"""What a model is, in figures, from its config alone: for `deepinfer info`. Loads no torch."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.checkpoint.tensors import TensorSpec
from deepinfer.model.tables import aligned, count, size
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.names import PARTS, catalogue
from deepinfer.model.v41.schedule import LayerPlan

# Parts that no matrix product of the backbone reads as a whole: not counted as active.
PASSIVE = ("embedding", "engram tables", "norms and biases", "draft experts", "draft", "vision")
HALVES = ("encoder", "decoder")


@dataclass(frozen=True)
class PartFigures:
    """One part of the model."""

    part: str
    num_parameters: int
    num_bytes: int
    bytes_by_dtype: dict[str, int]  # safetensors dtype -> bytes, scales among them


@dataclass(frozen=True)
class ModelReport:
    """Schedule, parameters, bytes and cache sizes of a model.

    backbone: parameters without engram tables, draft head and image encoder.
    active: parameters in the matrix products of one token. A prompt token that stops at the
        boundary costs `active_encoder` alone; every other token both.
    """

    layers: tuple[LayerPlan, ...]
    boundary: int
    parts: tuple[PartFigures, ...]
    total_parameters: int
    backbone_parameters: int
    active_encoder: int
    active_decoder: int
    total_bytes: int
    block_tokens: int
    bytes_per_block: int
    bytes_per_token: float
    bytes_per_request: int  # rings and compressor rows of one slot

    @property
    def active_parameters(self) -> int:
        return self.active_encoder + self.active_decoder

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self) | {"active_parameters": self.active_parameters}

    def as_text(self) -> str:
        """For people: four short tables."""
        return "\n\n".join((self._schedule_text(), self._parts_text(), self._totals_text()))

    def _schedule_text(self) -> str:
        rows = [("layer", "id", "ratio", "role", "KV from", "selection from", "half", "engram", "candidates")]
        for layer in self.layers:
            rows.append(
                (
                    str(layer.index),
                    str(layer.layer_id),
                    str(layer.ratio),
                    layer.role,
                    _or_dash(layer.kv_source),
                    _or_dash(layer.index_source),
                    "decoder" if layer.is_decoder else "encoder",
                    _or_dash(layer.engram),
                    "keeps" if layer.keeps_candidates else "uses" if layer.uses_candidates else "-",
                )
            )
        return aligned(rows)

    def _parts_text(self) -> str:
        rows = [("part", "parameters", "size", "formats")]
        for part in self.parts:
            formats = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in part.bytes_by_dtype.items())
            rows.append((part.part, count(part.num_parameters), size(part.num_bytes), formats))
        rows.append(("total", count(self.total_parameters), size(self.total_bytes), ""))
        return aligned(rows)

    def _totals_text(self) -> str:
        rows = [
            ("backbone parameters, engram tables apart", count(self.backbone_parameters)),
            ("active parameters per token", count(self.active_parameters)),
            ("  encoder half", count(self.active_encoder)),
            ("  decoder half and head", count(self.active_decoder)),
            ("cache per token", f"{self.bytes_per_token:g} B"),
            (f"cache per block of {self.block_tokens} tokens", f"{self.bytes_per_block:,} B"),
            ("cache per request besides", size(self.bytes_per_request)),
        ]
        return aligned(rows)


def model_report(config: ModelConfig) -> ModelReport:
    """The figures of a model."""
    specs = list(catalogue(config))
    parts = part_figures(specs)
    active = _active(specs, config)
    layout = cache_layout(config, config.num_drafts)
    outside = ("engram tables", "draft experts", "draft", "vision")
    return ModelReport(
        layers=config.layers,
        boundary=config.boundary,
        parts=parts,
        total_parameters=sum(part.num_parameters for part in parts),
        backbone_parameters=sum(part.num_parameters for part in parts if part.part not in outside),
        active_encoder=active["encoder"],
        active_decoder=active["decoder"],
        total_bytes=sum(part.num_bytes for part in parts),
        block_tokens=layout.block_tokens,
        bytes_per_block=layout.bytes_per_block,
        bytes_per_token=layout.bytes_per_token,
        bytes_per_request=layout.bytes_per_slot,
    )


def part_figures(specs: Iterable[TensorSpec]) -> tuple[PartFigures, ...]:
    """Parameters and bytes of each part that the model has, in catalogue order."""
    parameters: dict[str, int] = defaultdict(int)
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for spec in specs:
        parameters[spec.part] += spec.num_parameters
        sizes[spec.part][spec.dtype] += spec.num_bytes
    return tuple(
        PartFigures(part, parameters[part], sum(sizes[part].values()), dict(sizes[part]))
        for part in PARTS
        if part in sizes
    )


def _active(specs: Iterable[TensorSpec], config: ModelConfig) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    experts: dict[str, int] = defaultdict(int)
    for spec in specs:
        if spec.part not in PASSIVE:
            (experts if spec.part == "experts" else sums)[_half(spec, config)] += spec.num_parameters
    return {half: sums[half] + experts[half] * config.num_active_experts // config.num_experts for half in HALVES}


def _half(spec: TensorSpec, config: ModelConfig) -> str:
    """Where a part runs: the boundary layer's compressor sees every token, all else above only some."""
    if spec.layer is None or spec.layer > config.boundary:
        return "decoder"
    return "encoder" if spec.layer < config.boundary or spec.part == "compressor" else "decoder"


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
