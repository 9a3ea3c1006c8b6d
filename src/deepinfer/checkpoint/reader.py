"""A checkpoint folder: what its safetensors files hold, and their tensors when asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PREFIX = "model."  # may stand before every name


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what its file says of it."""

    shard: str
    stored_name: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]


@dataclass
class Problems:
    """What is wrong with a checkpoint, by kind, in the order found."""

    by_kind: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, thing: str) -> None:
        self.by_kind.setdefault(kind, []).append(thing)


class Checkpoint:
    """The tensors of one folder, as a `Source`; names have no `model.` prefix here.

    Opening reads the headers only. Each shard is opened once and mapped into memory, so a tensor
    that is asked for is read page by page when it is used (a large table never as a whole).
    What is wrong with files or index is collected in `problems`; `coverage.check` reports it.
    Raises CheckpointError when the folder holds no weights at all.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.problems = Problems()
        self._found: set[tuple[str, str]] = set()  # file and stored name of all tensors, those found twice too
        self._shards: dict[str, Any] = {}
        index = self._read_index()
        for shard in sorted(set(index.values())) if index is not None else [SINGLE_NAME]:
            self._open(shard)
        if index is not None:
            self._compare(index)

    def get(self, name: str) -> Tensor:
        """One tensor, mapped from its file. Raises CheckpointError when it is not there or unreadable."""
        stored = self._find(name)
        try:
            tensor: Tensor = self._shards[stored.shard].get_tensor(stored.stored_name)
        except (SafetensorError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"cannot read {stored.stored_name} from {self.folder / stored.shard}: {error}"
            ) from error
        return tensor

    def stack(self, names: Sequence[str]) -> Tensor:
        """Tensors of equal shape and dtype in one new tensor [len(names), ...]."""
        first = self.get(names[0])
        stacked = torch.empty(len(names), *first.shape, dtype=first.dtype)
        for place, name in enumerate(names):
            tensor = self.get(name)
            if tensor.shape != first.shape or tensor.dtype != first.dtype:
                raise CheckpointError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} but {names[0]} is {first.dtype} "
                    f"{list(first.shape)}; tensors of one stack must be alike"
                )
            stacked[place].view(torch.uint8).copy_(tensor.view(torch.uint8))
        return stacked

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}")
        return self.tensors[name]

    def _read_index(self) -> dict[str, str] | None:
        """Stored name -> file name; None when there is a single file without an index."""
        path = self.folder / INDEX_NAME
        if not path.exists():
            if not (self.folder / SINGLE_NAME).is_file():
                raise CheckpointError(f"{self.folder} has neither {INDEX_NAME} nor {SINGLE_NAME}; it holds no weights")
            return None
        try:
            index = json.loads(path.read_bytes().decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a JSON file: {str(error)[:200]}") from error
        weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise CheckpointError(f"{path} has no weight_map; it must map tensor names to files")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
                raise CheckpointError(f"{path} maps {name!r} to {str(shard)[:80]!r}; it must name a file of the folder")
        return dict(weight_map)

    def _open(self, shard: str) -> None:
        path = self.folder / shard
        if not path.is_file():
            self.problems.add("absent files", shard)
            return
        try:
            handle: Any = safe_open(path, framework="pt")  # safetensors gives no types
            self._shards[shard] = handle
            for stored_name in handle.keys():  # noqa: SIM118  a handle, not a mapping
                slice_ = handle.get_slice(stored_name)
                self._add(StoredTensor(shard, stored_name, str(slice_.get_dtype()), tuple(slice_.get_shape())))
        except (SafetensorError, OSError, ValueError) as error:
            self.problems.add("damaged files", f"{shard} ({error})")

    def _add(self, tensor: StoredTensor) -> None:
        self._found.add((tensor.shard, tensor.stored_name))
        name = tensor.stored_name.removeprefix(PREFIX)
        if name in self.tensors:
            other = self.tensors[name]
            places = f"{other.stored_name} in {other.shard} and {tensor.stored_name} in {tensor.shard}"
            self.problems.add("names found twice", f"{name} ({places})")
        else:
            self.tensors[name] = tensor

    def _compare(self, index: Mapping[str, str]) -> None:
        """Note where the index and the shards that could be read disagree."""
        for name, shard in index.items():
            if shard in self._shards and (shard, name) not in self._found:
                self.problems.add("tensors that the index places wrongly", f"{name} (not in {shard})")
        for shard, name in sorted(self._found):
            if name not in index:
                self.problems.add("tensors that the index does not list", f"{name} (in {shard})")
