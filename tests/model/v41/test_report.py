import json

import pytest

from deepinfer.model.v41.report import model_report
from model_configs import config


@pytest.fixture(scope="module")
def released():
    return model_report(config("released"))


def _part(report, name: str):
    return next(part for part in report.parts if part.part == name)


def test_released_parameters_are_the_published_ones(released):
    assert _part(released, "attention").num_parameters == 40 * 126_615_552
    assert _part(released, "experts").num_parameters == 543_581_798_400
    assert _part(released, "engram tables").num_parameters == 196_613_849_600
    assert _part(released, "engram projection").num_parameters == 314_572_800
    assert released.backbone_parameters == pytest.approx(552e9, rel=3e-4)


def test_active_parameters_are_those_of_the_matrix_products(released):
    index_keys = 4 * 512 * 128
    assert released.active_parameters == 16_129_720_320 + index_keys
    layer = 126_615_552 + 7 * 35_389_440 + 5120 * 384 + 2 * 24 * 4 * 5120  # attention, experts, router, mixes
    compressors = 3 * 2 * 5120 * 512 + 5120 * 512 + index_keys  # that of layer 20, the boundary, sees every token
    index_queries = 1280 * 4096 + 5120 * 32
    assert released.active_encoder == 20 * layer + 314_572_800 + compressors + 3 * index_queries
    assert released.active_decoder == 20 * layer + 129_280 * 5120 + 5 * index_queries


def test_bytes_follow_from_the_formats(released):
    experts = _part(released, "experts")
    assert experts.bytes_by_dtype == {"I8": 543_581_798_400 // 2, "F8_E8M0": 543_581_798_400 // 32}
    assert _part(released, "head").num_bytes == 2 * 129280 * 5120
    assert released.total_bytes == sum(part.num_bytes for part in released.parts)


def test_cache_figures_are_those_of_the_layout(released):
    assert (released.bytes_per_token, released.bytes_per_block, released.block_tokens) == (890, 113_920, 128)
    # 40 layers and 3 draft blocks; every ring has room for 5 drafts, the token ring of 9 numbers ends on 16 bytes
    assert released.bytes_per_request == 43 * 528 * 133 + 3 * 7 * 4096 + 48


def test_total_bytes_are_those_of_the_bundled_checkpoint():
    assert model_report(config("nano")).total_bytes == 42_247_678  # metadata.total_size of its index


def test_text_shows_schedule_parts_and_totals(released):
    text = released.as_text()
    lines = text.splitlines()
    assert lines[0].split() == [
        "layer",
        "id",
        "ratio",
        "role",
        "KV",
        "from",
        "selection",
        "from",
        "half",
        "engram",
        "candidates",
    ]
    assert lines[21].split() == ["20", "20", "1", "full", "20", "20", "decoder", "-", "keeps"]
    assert "cache per token                               890 B" in text
    assert "543.58 B" in text and "16.13 B" in text


def test_dict_is_json_with_the_same_figures(released):
    figures = json.loads(json.dumps(released.as_dict()))
    assert figures["bytes_per_token"] == 890 and figures["active_parameters"] == released.active_parameters
    assert figures["layers"][20]["role"] == "full"
