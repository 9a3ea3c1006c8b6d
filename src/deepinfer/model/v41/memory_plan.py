"""What fits on one device: weights of a rank, cache blocks, requests. From the config alone; loads no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from deepinfer.errors import ConfigError
from deepinfer.model.tables import aligned, size
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.names import catalogue
from deepinfer.model.v41.report import PartFigures, part_figures
from deepinfer.ops.expert_copies import copy_bytes

GIB = 2**30
RESERVED_SHARE = 0.05  # of the device, for activations and work space


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each of `num_ranks` equal devices, the whole checkpoint loaded.

    Experts and engram tables are split over the ranks, everything else is on each.
    All counts are 0 when not even one request of `context_tokens` fits.
    """

    device_bytes: int
    num_ranks: int
    context_tokens: int
    weight_bytes: dict[str, int]  # part -> bytes on the fullest rank; what a Hopper card keeps twice is a part
    reserved_bytes: int
    cache_bytes: int  # what is left for caches; negative when the weights alone do not fit
    bytes_per_request: int  # of `context_tokens`: blocks and slot
    num_requests: int  # at the same time, each of `context_tokens`
    num_blocks: int
    num_cache_tokens: int

    @property
    def fits(self) -> bool:
        return self.num_requests > 0

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return dataclasses.asdict(self) | {"fits": self.fits}

    def as_text(self) -> str:
        """For people."""
        rows = [(f"each of {self.num_ranks} ranks", size(self.device_bytes))]
        rows += [(f"  {part}", size(num_bytes)) for part, num_bytes in self.weight_bytes.items()]
        rows.append(("  reserved for activations", size(self.reserved_bytes)))
        if not self.fits:
            missing = self.bytes_per_request - self.cache_bytes
            rows.append(("does not fit; missing for one request", size(missing)))
            return aligned(rows)
        rows += [
            ("  left for caches", size(self.cache_bytes)),
            (f"requests of {self.context_tokens:,} tokens", f"{self.num_requests:,}"),
            ("cache blocks", f"{self.num_blocks:,}"),
            ("tokens in cache", f"{self.num_cache_tokens:,}"),
        ]
        return aligned(rows)


def memory_plan(
    config: ModelConfig, device_gib: float, num_ranks: int = 1, context_tokens: int | None = None
) -> MemoryPlan:
    """Plan for devices of `device_gib` GiB; context_tokens: the model's longest sequence when None.

    Raises ConfigError for a size, rank count or context that cannot be.
    """
    context_tokens = config.max_positions if context_tokens is None else context_tokens
    _check(config, device_gib, num_ranks, context_tokens)
    layout = cache_layout(config, config.num_drafts)
    device_bytes = int(device_gib * GIB)
    reserved_bytes = int(device_bytes * RESERVED_SHARE)
    weight_bytes = {part.part: _rank_bytes(part, config, num_ranks) for part in part_figures(catalogue(config))}
    if copied := _copied_bytes(config, num_ranks, device_bytes):
        weight_bytes["kept as e4m3 too (Hopper)"] = copied
    padding_bytes = layout.bytes_per_slot + layout.bytes_per_block
    cache_bytes = device_bytes - reserved_bytes - sum(weight_bytes.values()) - padding_bytes
    request_blocks = -(-context_tokens // layout.block_tokens) if layout.bytes_per_block else 0
    request_bytes = request_blocks * layout.bytes_per_block + layout.bytes_per_slot
    num_requests = max(cache_bytes // request_bytes, 0)
    num_blocks = 0
    if num_requests and layout.bytes_per_block:
        num_blocks = (cache_bytes - num_requests * layout.bytes_per_slot) // layout.bytes_per_block
    return MemoryPlan(
        device_bytes=device_bytes,
        num_ranks=num_ranks,
        context_tokens=context_tokens,
        weight_bytes=weight_bytes,
        reserved_bytes=reserved_bytes,
        cache_bytes=cache_bytes,
        bytes_per_request=request_bytes,
        num_requests=num_requests,
        num_blocks=num_blocks,
        num_cache_tokens=num_blocks * layout.block_tokens,
    )


def _rank_bytes(part: PartFigures, config: ModelConfig, num_ranks: int) -> int:
    """Bytes of a part on the fullest rank: whole experts and whole table rows."""
    if part.part == "experts":
        pieces = config.num_experts
    elif part.part == "draft experts" and config.draft is not None:
        pieces = config.draft.num_experts
    elif part.part == "engram tables" and config.engram is not None:
        pieces = sum(table.num_rows for table in config.engram.tables)
    else:
        return part.num_bytes
    return part.num_bytes // pieces * -(-pieces // num_ranks)


def _copied_bytes(config: ModelConfig, num_ranks: int, device_bytes: int) -> int:
    """Bytes that the fullest rank keeps as e4m3 too: experts, and the output matrix for drafts."""
    blocks = [config.num_experts] * config.num_layers
    output_bytes = 0
    if config.draft is not None:
        output_bytes = config.vocab_size * config.hidden_size
        blocks += [config.draft.num_experts] * config.draft.num_stages
    sizes = config.hidden_size, config.expert_size, device_bytes
    return output_bytes + sum(copy_bytes(-(-num_experts // num_ranks), *sizes) for num_experts in blocks)


def _check(config: ModelConfig, device_gib: float, num_ranks: int, context_tokens: int) -> None:
    if not 0 < device_gib < 1e6:
        raise ConfigError(f"device size is {device_gib} GiB; it must be above 0")
    if not 1 <= num_ranks <= 65536:
        raise ConfigError(f"rank count is {num_ranks}; it must be from 1 to 65536")
    if not 1 <= context_tokens <= config.max_positions:
        raise ConfigError(f"context is {context_tokens} tokens; this model takes 1 to {config.max_positions}")
