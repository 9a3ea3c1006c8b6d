import json

import pytest

from deepinfer.model.v41.names import PARTS, catalogue
from model_configs import GOLDEN, NANO, config


def _headers(folder) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape, read from the raw headers of a folder's safetensors files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items() if name[:2] != "__"}
    return found


@pytest.mark.parametrize(("name", "folder", "num_tensors"), [("golden", GOLDEN, 801), ("nano", NANO, 1761)])
def test_catalogue_is_what_the_checkpoint_holds(name, folder, num_tensors):
    expected = {spec.name: (spec.dtype, spec.shape) for spec in catalogue(config(name))}
    assert expected == _headers(folder)
    assert len(expected) == num_tensors


def test_names_are_unique_and_parts_known():
    specs = list(catalogue(config("released")))
    assert len({spec.name for spec in specs}) == len(specs) == 96_085
    assert {spec.part for spec in specs} == set(PARTS)


def test_cut_model_names_tensors_by_their_checkpoint_layer():
    specs = list(catalogue(config("released").cut((0, 2, 20))))
    assert {spec.name.split(".")[1] for spec in specs if spec.name.startswith("layers.")} == {"0", "2", "20"}
    assert {spec.layer for spec in specs if spec.name.startswith("layers.20.")} == {2}
    assert not [spec.name for spec in specs if spec.name.startswith("mtp.") or ".engram." in spec.name]


def test_scales_are_per_tile_or_per_row_and_32_columns():
    shapes = {spec.name: spec.shape for spec in catalogue(config("released"))}
    assert shapes["layers.20.attn.wkv.weight"] == (512, 5120)
    assert shapes["layers.20.attn.wkv.scale"] == (16, 160)
    assert shapes["layers.0.ffn.experts.383.w2.weight"] == (5120, 1152)
    assert shapes["layers.0.ffn.experts.383.w2.scale"] == (5120, 72)
    assert shapes["layers.1.engram.embed.scale"] == (384_006_168, 8)
