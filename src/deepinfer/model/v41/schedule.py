"""The layer schedule: what each layer reads, owns and selects, decided once from the config.

full      KV source: owns compressed vectors and index keys, selects for itself and those after
reindex   selects anew over the keys of its KV source
reuse     takes the selection of the last full or reindex layer
window    reads nothing but its own sliding window
draft     a block of the draft head: the same, over main vectors instead of its own
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer.cache.groups import block_tokens_for
from deepinfer.errors import ConfigError
from deepinfer.model.section import Section

Role = Literal["window", "full", "reindex", "reuse", "draft"]
MAX_BLOCK_TOKENS = 65536


@dataclass(frozen=True)
class LayerPlan:
    """One layer. Indexes count the layers of this engine; ids count those of the checkpoint."""

    index: int
    layer_id: int
    ratio: int  # tokens per compressed vector; 0 = window only
    role: Role
    kv_source: int | None  # index of the layer whose compressed vectors it reads
    index_source: int | None  # index of the layer whose selection it uses
    is_decoder: bool  # in the half that a bounded prefill skips
    engram: int | None  # which engram table
    keeps_candidates: bool  # selects the candidate blocks
    uses_candidates: bool  # scores only inside the candidate blocks

    @property
    def owns_kv(self) -> bool:
        """Whether it writes compressed vectors and index keys."""
        return self.role == "full"

    @property
    def owns_index(self) -> bool:
        """Whether it selects entries."""
        return self.role in ("full", "reindex")


def plan_layers(text: Section, num_layers: int, num_stages: int) -> tuple[LayerPlan, ...]:
    """The schedule of a checkpoint. Raises ModelError for one that cannot be run."""
    ratios = _ratios(text, num_layers, num_stages)
    kv_sources = text.ascending("kv_source_layer_ids", num_layers - 1)
    index_sources = text.ascending("index_source_layer_ids", num_layers - 1)
    engram_layers = text.ascending("engram_layer_ids", num_layers - 1)
    candidate_source = text.integer("candidate_source_layer_id", -1, num_layers - 1, default=-1)
    _check_sources(text, ratios, kv_sources, index_sources)
    _check_candidates(text, ratios, index_sources, candidate_source)
    boundary = kv_sources[-1] if kv_sources else num_layers
    return tuple(
        LayerPlan(
            index=layer,
            layer_id=layer,
            ratio=ratio,
            role=_role(layer, ratio, kv_sources, index_sources),
            kv_source=_last(kv_sources, layer) if ratio else None,
            index_source=_last(index_sources, layer) if ratio else None,
            is_decoder=layer >= boundary,
            engram=engram_layers.index(layer) if layer in engram_layers else None,
            keeps_candidates=layer == candidate_source,
            uses_candidates=0 <= candidate_source < layer and layer in index_sources,
        )
        for layer, ratio in enumerate(ratios)
    )


def cut_layers(layers: Sequence[LayerPlan], layer_ids: Sequence[int]) -> tuple[LayerPlan, ...]:
    """Only the layers with these ids, renumbered.

    A dropped engram layer takes its table along; without the candidate source there are no candidates.
    Raises ConfigError for an id that is not there, ids not ascending, or a layer without its source.
    """
    known = {layer.layer_id: layer for layer in layers}
    for layer_id in layer_ids:
        if layer_id not in known:
            raise ConfigError(f"layers names {layer_id}; the checkpoint has layers 0 to {max(known)}")
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise ConfigError(f"layers is {tuple(layer_ids)}; it must be ascending layer numbers, as in 0,2,20")
    kept = [known[layer_id] for layer_id in layer_ids]
    places = {layer.index: place for place, layer in enumerate(kept)}
    tables = [layer.engram for layer in kept if layer.engram is not None]
    boundary = max((place for place, layer in enumerate(kept) if layer.owns_kv), default=len(kept))
    has_candidates = any(layer.keeps_candidates for layer in kept)

    def moved(layer: LayerPlan, source: int | None, what: str) -> int | None:
        if source is None:
            return None
        if source not in places:
            missing = layers[source].layer_id
            raise ConfigError(
                f"layers keeps {layer.layer_id}, which reads the {what} of layer {missing}; add {missing}"
            )
        return places[source]

    return tuple(
        dataclasses.replace(
            layer,
            index=place,
            kv_source=moved(layer, layer.kv_source, "compressed vectors"),
            index_source=moved(layer, layer.index_source, "selection"),
            is_decoder=place >= boundary,
            engram=None if layer.engram is None else tables.index(layer.engram),
            uses_candidates=layer.uses_candidates and has_candidates,
        )
        for place, layer in enumerate(kept)
    )


def _ratios(text: Section, num_layers: int, num_stages: int) -> tuple[int, ...]:
    ratios = text.integers("compress_ratios", 0, MAX_BLOCK_TOKENS)
    if len(ratios) not in (num_layers, num_layers + num_stages):
        text.refuse(
            "compress_ratios",
            f"it lists {len(ratios)} layers; it must list num_hidden_layers ({num_layers}), "
            f"or these and the {num_stages} draft stages",
        )
    if any(ratios[num_layers:]):
        text.refuse("compress_ratios", "the draft stages at its end must have ratio 0, since they read a window only")
    used = sorted({ratio for ratio in ratios if ratio})
    if used and (math.lcm(*used) > MAX_BLOCK_TOKENS or block_tokens_for(used) > MAX_BLOCK_TOKENS):
        text.refuse(
            "compress_ratios",
            f"a cache block must be a common multiple of {used}; it may have at most {MAX_BLOCK_TOKENS} tokens",
        )
    return ratios[:num_layers]


def _check_sources(
    text: Section, ratios: Sequence[int], kv_sources: Sequence[int], index_sources: Sequence[int]
) -> None:
    for source in kv_sources:
        if not ratios[source]:
            text.refuse("kv_source_layer_ids", f"layer {source} has compress_ratios 0; a KV source needs a ratio >= 1")
        if source not in index_sources:
            text.refuse("kv_source_layer_ids", f"layer {source} must be in index_source_layer_ids too")
    for source in index_sources:
        if not ratios[source]:
            text.refuse(
                "index_source_layer_ids", f"layer {source} has compress_ratios 0; an index source needs a ratio >= 1"
            )
    for layer, ratio in enumerate(ratios):
        if not ratio:
            continue
        owner = _last(kv_sources, layer)
        if owner is None:
            text.refuse("kv_source_layer_ids", f"layer {layer} has ratio {ratio} but no KV source at or before it")
        if ratios[owner] != ratio:
            text.refuse(
                "compress_ratios",
                f"layer {layer} has ratio {ratio} but its KV source, layer {owner}, has {ratios[owner]}; "
                "they must be equal",
            )


def _check_candidates(text: Section, ratios: Sequence[int], index_sources: Sequence[int], source: int) -> None:
    if source < 0:
        return
    if source not in index_sources:
        text.refuse("candidate_source_layer_id", "it must be one of index_source_layer_ids")
    for layer in index_sources:
        if layer > source and ratios[layer] != ratios[source]:
            text.refuse(
                "candidate_source_layer_id",
                f"index source {layer} after it has ratio {ratios[layer]}, not {ratios[source]}; "
                "candidate blocks mean the same entries only at the same ratio",
            )


def _role(layer: int, ratio: int, kv_sources: Sequence[int], index_sources: Sequence[int]) -> Role:
    if not ratio:
        return "window"
    if layer in kv_sources:
        return "full"
    return "reindex" if layer in index_sources else "reuse"


def _last(sources: Sequence[int], layer: int) -> int | None:
    place = bisect_right(sources, layer)
    return sources[place - 1] if place else None
