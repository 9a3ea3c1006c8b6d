import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepinfer.checkpoint.coverage import MAX_SHOWN, check
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.checkpoint.tensors import TensorSpec
from deepinfer.errors import CheckpointError
from deepinfer.model.v41.names import catalogue
from model_configs import GOLDEN, NANO, config

NEEDED = [TensorSpec(name, "F32", (2, 3), "p", None, 1.0) for name in ("a", "b", "c")]
TENSOR = torch.zeros(2, 3)


def _write(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> None:
    for shard, tensors in shards.items():
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / shard)
    found = {name: shard for shard, tensors in shards.items() for name in tensors}
    index = {"weight_map": found if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        check(Checkpoint(folder), NEEDED)
    return str(refused.value)


@pytest.mark.parametrize(("name", "folder"), [("golden", GOLDEN), ("nano", NANO)])
def test_whole_checkpoints_pass(name: str, folder: Path):
    check(Checkpoint(folder), catalogue(config(name)))


def test_layers_that_a_cut_leaves_out_are_not_unexpected():
    cut = config("golden").cut((0, 4))
    check(Checkpoint(GOLDEN), catalogue(cut), catalogue(config("golden")))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*layers\.1\."):
        check(Checkpoint(GOLDEN), catalogue(cut))


def test_prefix_and_shards_do_not_matter(tmp_path: Path):
    _write(tmp_path, {"x.safetensors": {"model.a": TENSOR, "b": TENSOR}, "y.safetensors": {"model.c": TENSOR}})
    check(Checkpoint(tmp_path), NEEDED)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path):
    _write(tmp_path, {"x.safetensors": {"a": TENSOR, "b": TENSOR, "model.d": TENSOR}})
    text = _refusal(tmp_path)
    assert "1 missing tensors: c (F32 [2, 3])" in text
    assert "1 unexpected tensors: d" in text


def test_wrong_dtype_and_shape_are_shown_with_what_must_be(tmp_path: Path):
    _write(tmp_path, {"x.safetensors": {"a": TENSOR.half(), "b": TENSOR.T.contiguous(), "c": TENSOR}})
    text = _refusal(tmp_path)
    assert "1 tensors of the wrong dtype: a (is F16, must be F32)" in text
    assert "1 tensors of the wrong shape: b (is [3, 2], must be [2, 3])" in text


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_truncated_shard_is_named(tmp_path: Path, keep: int):
    _write(tmp_path, {"x.safetensors": {"a": TENSOR, "b": TENSOR}, "y.safetensors": {"c": TENSOR}})
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(whole[:keep])
    text = _refusal(tmp_path)
    assert "1 damaged files: x.safetensors (" in text
    assert "2 missing tensors: a (F32 [2, 3]); b (F32 [2, 3])" in text


def test_corrupt_header_is_named(tmp_path: Path):
    _write(tmp_path, {"x.safetensors": {"a": TENSOR, "b": TENSOR, "c": TENSOR}})
    damaged = bytearray((tmp_path / "x.safetensors").read_bytes())
    damaged[8:40] = b"\x00" * 32
    (tmp_path / "x.safetensors").write_bytes(damaged)
    assert "1 damaged files: x.safetensors (" in _refusal(tmp_path)


def test_absent_file_is_named(tmp_path: Path):
    _write(
        tmp_path,
        {"x.safetensors": {"a": TENSOR, "b": TENSOR}},
        {"a": "x.safetensors", "b": "x.safetensors", "c": "gone"},
    )
    text = _refusal(tmp_path)
    assert "1 absent files: gone" in text and "1 missing tensors: c" in text


def test_index_that_places_a_tensor_wrongly_is_refused(tmp_path: Path):
    shards = {"x.safetensors": {"a": TENSOR, "b": TENSOR}, "y.safetensors": {"c": TENSOR}}
    _write(tmp_path, shards, {"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"})
    assert "1 tensors that the index places wrongly: a (not in y.safetensors)" in _refusal(tmp_path)


def test_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path):
    _write(
        tmp_path,
        {"x.safetensors": {"a": TENSOR, "b": TENSOR, "c": TENSOR}},
        {"a": "x.safetensors", "b": "x.safetensors"},
    )
    assert "1 tensors that the index does not list: c (in x.safetensors)" in _refusal(tmp_path)


def test_same_name_twice_is_refused(tmp_path: Path):
    _write(tmp_path, {"x.safetensors": {"a": TENSOR, "b": TENSOR, "model.a": TENSOR}, "y.safetensors": {"c": TENSOR}})
    assert "1 names found twice: a (a in x.safetensors and model.a in x.safetensors)" in _refusal(tmp_path)


def test_every_kind_of_problem_comes_in_one_error(tmp_path: Path):
    first, second = "x.safetensors", "y.safetensors"
    shards = {first: {"a": TENSOR.half(), "model.a": TENSOR, "d": TENSOR}, second: {"c": TENSOR.T.contiguous()}}
    _write(tmp_path, shards, {"a": first, "model.a": first, "c": second, "b": "z", "e": first})
    kinds = [line.split(": ")[0].strip() for line in _refusal(tmp_path).splitlines()[1:-1]]
    assert kinds == [
        "1 names found twice",
        "1 absent files",
        "1 tensors that the index places wrongly",
        "1 tensors that the index does not list",
        "1 tensors of the wrong dtype",
        "1 missing tensors",
        "1 tensors of the wrong shape",
        "1 unexpected tensors",
    ]


def test_long_lists_are_bounded_and_counted(tmp_path: Path):
    _write(tmp_path, {"x.safetensors": {f"extra{i:03}": TENSOR for i in range(50)} | {n: TENSOR for n in "abc"}})
    text = _refusal(tmp_path)
    assert text.count("extra") == MAX_SHOWN == 20
    assert "50 unexpected tensors: extra000" in text and "and 30 more" in text
