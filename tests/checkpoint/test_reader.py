import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.errors import CheckpointError

A, B = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.ones(4, dtype=torch.bfloat16)


def _sharded(folder: Path, weight_map: dict[str, str], **shards: dict[str, torch.Tensor]) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_single_file_is_read(tmp_path: Path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.get("a"), A) and torch.equal(checkpoint.get("b"), B)
    assert (checkpoint.tensors["b"].dtype, checkpoint.tensors["b"].shape) == ("BF16", (4,))


def test_shards_are_read_through_the_index(tmp_path: Path):
    _sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one={"a": A}, two={"b": B})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.problems.by_kind == {}
    assert torch.equal(checkpoint.get("a"), A) and torch.equal(checkpoint.get("b"), B)


def test_model_prefix_is_optional(tmp_path: Path):
    _sharded(tmp_path, {"model.a": "one.safetensors", "b": "one.safetensors"}, one={"model.a": A, "b": B})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.problems.by_kind == {}
    assert torch.equal(checkpoint.get("a"), A) and torch.equal(checkpoint.get("b"), B)


def test_tensors_are_mapped_from_the_file_rather_than_copied(tmp_path: Path):
    save_file({"table": torch.zeros(2**20)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    first, second = checkpoint.get("table"), checkpoint.get("table")  # both alive
    assert first.data_ptr() == second.data_ptr()


def test_stack_puts_members_in_the_given_order(tmp_path: Path):
    save_file({str(i): torch.full((2, 2), i, dtype=torch.int8) for i in range(3)}, tmp_path / "model.safetensors")
    stacked = Checkpoint(tmp_path).stack(["2", "0", "1"])
    assert stacked.shape == (3, 2, 2) and stacked[:, 0, 0].tolist() == [2, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bfloat16, torch.float32])
def test_stack_keeps_the_bits_of_every_dtype(tmp_path: Path, dtype: torch.dtype):
    codes = torch.arange(64, dtype=torch.uint8).view(dtype).reshape(4, -1)
    save_file({"x": codes, "y": codes.clone()}, tmp_path / "model.safetensors")
    stacked = Checkpoint(tmp_path).stack(["x", "y"])
    assert stacked.dtype == dtype and torch.equal(stacked[1].view(torch.uint8), codes.view(torch.uint8))


def test_stack_of_unlike_tensors_is_refused(tmp_path: Path):
    save_file({"a": A, "b": B}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensors of one stack must be alike"):
        Checkpoint(tmp_path).stack(["a", "b"])


def test_missing_tensor_is_named(tmp_path: Path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no tensor 'c'"):
        Checkpoint(tmp_path).get("c")


def test_folder_without_weights_says_what_was_looked_for(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a JSON file"),
        (b"\xff", "is not a JSON file"),
        (b"[" * 100_000, "is not a JSON file"),
        (b"[]", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": {"a": 3}}', "maps 'a' to '3'; it must name a file of the folder"),
        (b'{"weight_map": {"a": "../secret"}}', "it must name a file of the folder"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "it must name a file of the folder"),
        (b'{"weight_map": {"a": ".."}}', "it must name a file of the folder"),
    ],
)
def test_hostile_index_is_a_checkpoint_error(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)
