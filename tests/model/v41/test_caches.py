import os
import subprocess
import sys

import pytest

from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import ModelConfig
from model_configs import TESTS, config, values


def test_released_model_takes_890_bytes_per_token():
    layout = cache_layout(config("released"))
    assert (layout.block_tokens, layout.bytes_per_block, layout.bytes_per_token) == (128, 113_920, 890.0)


def test_kv_sources_own_blocks_of_packed_entries():
    groups = {group.name: group for group in cache_layout(config("released")).block_groups}
    assert list(groups) == [f"{kind}.{layer}" for layer in (2, 8, 14, 20) for kind in ("compressed", "index")]
    assert (groups["compressed.2"].bytes_per_entry, groups["compressed.2"].num_entries) == (288, 64)
    assert (groups["index.20"].bytes_per_entry, groups["index.20"].num_entries) == (68, 128)
    assert (groups["index.2"].tokens_per_entry, groups["index.20"].tokens_per_entry) == (2, 1)


def test_every_layer_has_a_window_ring_and_gated_sources_their_state():
    groups = {group.name: group for group in cache_layout(config("released"), num_drafts=5).slot_groups}
    assert (groups["window.39"].bytes_per_entry, groups["window.39"].num_entries) == (528, 133)
    assert sum(name.startswith("window.") for name in groups) == 43  # 40 layers and 3 draft blocks
    assert [name for name in groups if name.startswith("state.")] == ["state.2", "state.8", "state.14"]
    assert (groups["state.2"].bytes_per_entry, groups["state.2"].num_entries) == (4096, 7)


@pytest.mark.parametrize(("name", "length"), [("released", 4), ("nano", 3), ("golden", 4)])
def test_token_ring_holds_the_newest_token_and_its_look_back(name: str, length: int):
    assert cache_layout(config(name)).slot_groups[-1].num_entries == length
    assert cache_layout(config(name), num_drafts=3).slot_groups[-1].num_entries == length + 3


def test_names_use_the_numbers_of_the_cut_model():
    layout = cache_layout(config("released").cut((0, 2, 20)))
    assert [group.name for group in layout.groups] == [
        *("compressed.1", "index.1", "compressed.2", "index.2"),
        *("window.0", "window.1", "window.2", "state.1", "tokens"),
    ]
    assert layout.slot_groups[-1].num_entries == 2


def test_block_is_a_multiple_of_any_ratio():
    changed = values("golden")
    changed["text_config"]["compress_ratios"] = [0, 3, 3, 3, 5, 5, 5, 5]
    layout = cache_layout(ModelConfig.from_mapping(changed))
    assert layout.block_tokens == 135
    assert [group.num_entries for group in layout.block_groups] == [45, 45, 27, 27]


def test_config_caches_and_figures_load_no_torch():
    modules = [f"deepinfer.model.v41.{name}" for name in ("config", "caches", "names", "report", "memory_plan")]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules}]; print('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "False"
