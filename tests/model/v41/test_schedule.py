import pytest

from deepinfer.errors import ConfigError
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.schedule import LayerPlan
from model_configs import config, values

LETTERS = {"window": "w", "full": "F", "reindex": "i", "reuse": "."}
SCHEDULES = {
    "released": "wwF.....F.....F.....F...i...i...i...i...",
    "nano": "wwF.F.F.i.i.",
    "golden": "wF.iF.i.",
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_roles_follow_the_source_lists(name: str):
    assert "".join(LETTERS[layer.role] for layer in config(name).layers) == SCHEDULES[name]


@pytest.mark.parametrize(("name", "boundary"), [("released", 20), ("nano", 6), ("golden", 4)])
def test_decoder_half_begins_at_the_last_kv_source(name: str, boundary: int):
    assert config(name).boundary == boundary
    assert [layer.is_decoder for layer in config(name).layers].index(True) == boundary


def test_every_layer_reads_the_last_source_at_or_before_it():
    layers = config("released").layers
    assert layers[1].kv_source is None and layers[1].index_source is None
    assert [layers[i].kv_source for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [layers[i].index_source for i in (2, 13, 20, 23, 24, 27, 39)] == [2, 8, 20, 20, 24, 24, 36]


def test_candidates_are_kept_by_one_layer_and_used_by_later_index_sources():
    layers = config("released").layers
    assert [layer.index for layer in layers if layer.keeps_candidates] == [20]
    assert [layer.index for layer in layers if layer.uses_candidates] == [24, 28, 32, 36]


def test_engram_layers_know_their_table():
    assert {layer.index: layer.engram for layer in config("released").layers if layer.engram is not None} == {
        1: 0,
        14: 1,
    }


def test_window_layer_between_compressed_ones_keeps_the_sources_of_the_others():
    changed = values("golden")
    changed["text_config"]["compress_ratios"][2] = 0
    layers = ModelConfig.from_mapping(changed).layers
    assert (layers[2].role, layers[2].kv_source) == ("window", None)
    assert (layers[3].role, layers[3].kv_source) == ("reindex", 1)


def test_cut_renumbers_layers_and_sources():
    cut = config("released").cut((0, 2, 20))
    assert cut.layers == (
        LayerPlan(0, 0, 0, "window", None, None, False, None, False, False),
        LayerPlan(1, 2, 2, "full", 1, 1, False, None, False, False),
        LayerPlan(2, 20, 1, "full", 2, 2, True, None, True, False),
    )
    assert (cut.boundary, cut.engram, cut.draft) == (2, None, None)


def test_cut_keeps_the_engram_tables_of_kept_layers():
    cut = config("released").cut((0, 14, 15))
    assert [layer.engram for layer in cut.layers] == [None, 0, None]
    assert [(table.layer_id, table.position) for table in cut.engram.tables] == [(14, 1)]


def test_cut_keeps_the_draft_head_with_all_its_targets():
    released = config("released")
    kept = (20, 24, 28, 32, 36, 37, 38, 39)
    assert released.cut(kept).draft.target_layers == (5, 6, 7)
    assert released.cut(kept[:-1]).draft is None


def test_cut_without_the_candidate_source_has_no_candidates():
    changed = values("golden")  # two KV sources of ratio 1, candidates from the first
    changed["text_config"] |= {"compress_ratios": [0, 1, 1, 1, 1, 1, 1, 1], "candidate_source_layer_id": 1}
    layers = ModelConfig.from_mapping(changed)
    assert layers.cut((1, 4, 6)).layers[2].uses_candidates
    assert not any(layer.uses_candidates for layer in layers.cut((4, 6)).layers)


def test_cut_of_everything_changes_nothing():
    for name in SCHEDULES:
        assert config(name).cut(range(config(name).num_layers)) == config(name)


def test_cut_can_be_cut_again_by_checkpoint_numbers():
    assert config("released").cut((0, 2, 20, 21)).cut((2, 20)) == config("released").cut((2, 20))


@pytest.mark.parametrize(
    ("layer_ids", "message"),
    [
        ((0, 22), "layers keeps 22, which reads the compressed vectors of layer 20; add 20"),
        ((20, 26), "layers keeps 26, which reads the selection of layer 24; add 24"),
        ((0, 40), "layers names 40; the checkpoint has layers 0 to 39"),
        ((2, 0), "must be ascending"),
        ((0, 0), "must be ascending"),
        ((), "must be ascending"),
    ],
)
def test_cut_that_cannot_run_says_why(layer_ids: tuple[int, ...], message: str):
    with pytest.raises(ConfigError) as refused:
        config("released").cut(layer_ids)
    assert message in str(refused.value)
