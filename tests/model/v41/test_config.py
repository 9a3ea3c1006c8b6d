import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.errors import ModelError
from deepinfer.model.section import MAX_FILE_BYTES
from deepinfer.model.v41.config import ModelConfig
from deepinfer.ops.weights import RopeSpec
from model_configs import FILES, config, values


def test_released_file_is_read_with_its_sizes():
    released = config("released")
    assert (released.num_layers, released.boundary, released.block_tokens) == (40, 20, 128)
    assert (released.hidden_size, released.num_heads, released.head_dim, released.rope_dim) == (5120, 64, 512, 64)
    assert (released.num_experts, released.num_active_experts, released.expert_size) == (384, 6, 2304)
    assert (released.index_top_k, released.candidate_blocks, released.candidate_size) == (512, 2048, 8)
    assert (released.eos_ids, released.bos_id, released.pad_id, released.image_id) == ((1,), 0, 2, 129264)
    assert released.norm_eps == 1e-20 and released.gate_temp == 1.0 and released.scoring == "sqrtsoftplus"
    assert released.draft.target_layers == (37, 38, 39) and released.vision.max_aspect is None


def test_compressed_layers_use_their_own_theta_and_yarn():
    released = config("released")
    assert released.rope(0) == RopeSpec(64, 10000.0)
    assert released.rope(1) == released.rope(2) == RopeSpec(64, 160000.0, 16.0, 32.0, 1.0, 65536)


def test_rope_scaling_without_trained_length_means_no_yarn():
    changed = values("golden")
    del changed["text_config"]["rope_scaling"]["original_max_position_embeddings"]
    assert ModelConfig.from_mapping(changed).compressed_rope == RopeSpec(32, 160000.0)
    changed["text_config"]["rope_scaling"] = None
    assert ModelConfig.from_mapping(changed).compressed_rope == RopeSpec(32, 160000.0)


def test_compress_ratios_may_leave_out_the_draft_stages():
    changed = values("golden")
    del changed["text_config"]["compress_ratios"][8:]
    assert ModelConfig.from_mapping(changed) == config("golden")


def test_parts_that_a_model_lacks_are_none():
    changed = values("golden")
    del changed["vision_config"], changed["image_token_id"]
    changed["text_config"] |= {"engram_layer_ids": [], "num_nextn_predict_layers": 0}
    del changed["text_config"]["compress_ratios"][8:]
    plain = ModelConfig.from_mapping(changed)
    assert (plain.vision, plain.engram, plain.draft, plain.image_id) == (None, None, None, -1)


def test_several_end_tokens_are_kept_in_order():
    assert ModelConfig.from_mapping(values("golden") | {"eos_token_id": [7, 1]}).eos_ids == (7, 1)


def test_window_only_model_has_no_decoder_half():
    changed = values("golden")
    text = changed["text_config"]
    text |= {"compress_ratios": [0] * 10, "kv_source_layer_ids": [], "index_source_layer_ids": []}
    text |= {"candidate_source_layer_id": None}
    for key in ("index_n_heads", "index_head_dim", "index_topk", "candidate_topk_blocks", "candidate_block_size"):
        del text[key]
    plain = ModelConfig.from_mapping(changed)
    assert plain.boundary == plain.num_layers == 8
    assert not any(layer.is_decoder for layer in plain.layers)


REFUSED = [
    ("architectures", ["LlamaForCausalLM"], 'architectures is ["LlamaForCausalLM"]; this engine runs Deepseek'),
    ("architectures", [], "architectures"),
    ("model_type", "llama", 'model_type is "llama"; this engine runs deepseek_v41'),
    ("quantization_config", None, "quantization_config is null; it must be an object"),
    ("quantization_config.expert_dtype", "fp8", "quantization_config.expert_dtype"),
    ("quantization_config.weight_block_size", [128, 128], "weight_block_size is [128, 128]; this engine runs [32, 32]"),
    ("quantization_config.scale_fmt", "float", "scale_fmt"),
    ("text_config", 3, "text_config is 3; it must be an object"),
    ("text_config.vocab_size", "640", 'text_config.vocab_size is "640"; it must be a whole number from 2'),
    ("text_config.hidden_size", 0, "hidden_size is 0"),
    ("text_config.hidden_size", 100, "hidden_size is 100; it must be a multiple of 32"),
    ("text_config.hidden_size", True, "hidden_size is true"),
    ("text_config.head_dim", 48, "head_dim is 48; it must be a multiple of 32"),
    ("text_config.index_head_dim", 40, "index_head_dim is 40; it must be a multiple of 32"),
    ("text_config.num_attention_heads", 5, "num_attention_heads is 5; it must be a multiple of o_groups (2)"),
    ("text_config.o_lora_rank", 24, "o_lora_rank"),
    ("text_config.qk_rope_head_dim", 31, "qk_rope_head_dim is 31; it must be even"),
    ("text_config.qk_rope_head_dim", 128, "qk_rope_head_dim is 128; it must be at most head_dim"),
    ("text_config.num_key_value_heads", 2, "num_key_value_heads is 2"),
    ("text_config.hidden_act", "gelu", "hidden_act"),
    ("text_config.scoring_func", "relu", "scoring_func"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings is true; this engine runs models where it is false"),
    ("text_config.attention_bias", True, "attention_bias"),
    ("text_config.rms_norm_eps", float("nan"), "rms_norm_eps is NaN"),
    ("text_config.rope_theta", float("inf"), "rope_theta is Infinity"),
    ("text_config.rope_theta", -1, "rope_theta is -1"),
    ("text_config.max_position_embeddings", 10**400, "max_position_embeddings is a number of 1329 bits"),
    ("text_config.rope_scaling", {"rope_type": "linear"}, "rope_scaling.rope_type"),
    ("text_config.num_experts_per_tok", 9, "num_experts_per_tok is 9; it must be a whole number from 1 to 8"),
    ("text_config.compress_ratios", [0, 2], "compress_ratios is [0, 2]; it lists 2 layers"),
    ("text_config.compress_ratios", [0, 2, 2, 2, 1, 1, 1, 1, 2, 0], "draft stages at its end must have ratio 0"),
    ("text_config.compress_ratios", [0, 2, 2, 3, 1, 1, 1, 1], "layer 3 has ratio 3 but its KV source, layer 1, has 2"),
    ("text_config.compress_ratios", [0, 32749, 32749, 32749, 3, 3, 3, 3], "may have at most 65536 tokens"),
    ("text_config.kv_source_layer_ids", [4, 1], "must be ascending"),
    ("text_config.kv_source_layer_ids", [4], "layer 1 has ratio 2 but no KV source at or before it"),
    ("text_config.kv_source_layer_ids", [0, 1, 4], "layer 0 has compress_ratios 0"),
    ("text_config.kv_source_layer_ids", [1, 2, 4], "layer 2 must be in index_source_layer_ids too"),
    ("text_config.index_source_layer_ids", [0, 1, 3, 4, 6], "layer 0 has compress_ratios 0"),
    ("text_config.candidate_source_layer_id", 5, "candidate_source_layer_id is 5; it must be one of"),
    ("text_config.candidate_source_layer_id", 1, "index source 4 after it has ratio 1, not 2"),
    ("text_config.engram_layer_ids", [1, 8], "engram_layer_ids"),
    ("text_config.engram_num_embeddings", [2514], "one table size for each of 2 engram layers"),
    ("text_config.engram_pad_token_id", 640, "engram_pad_token_id is 640"),
    ("text_config.dspark_target_layer_ids", [], "at least one target layer"),
    ("text_config.dspark_noise_token_id", -1, "dspark_noise_token_id is -1"),
    ("eos_token_id", 640, "eos_token_id is 640"),
    ("eos_token_id", [1, "2"], "eos_token_id"),
    ("image_token_id", None, "image_token_id is null"),
    ("vision_config.hidden_size", 36, "vision_config.hidden_size is 36"),
]


@pytest.mark.parametrize(("key", "value", "message"), REFUSED, ids=[f"{key}={str(v)[:24]}" for key, v, _ in REFUSED])
def test_what_cannot_be_run_is_refused_by_key_value_and_rule(key: str, value: object, message: str):
    changed = values("golden")
    *parents, last = key.split(".")
    section = changed
    for parent in parents:
        section = section[parent]
    section[last] = value
    with pytest.raises(ModelError, match=re.escape(message)):
        ModelConfig.from_mapping(changed)


REQUIRED = ["vocab_size", "hidden_size", "num_hidden_layers", "compress_ratios", "n_routed_experts", "rms_norm_eps"]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str):
    changed = values("released")
    del changed["text_config"][key]
    with pytest.raises(ModelError, match=f"text_config.{key} is missing"):
        ModelConfig.from_mapping(changed)


HOSTILE_FILES = {
    "empty": b"",
    "not JSON": b"{architectures",
    "not UTF-8": b"\xff\xfe{}",
    "deep nesting": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "huge number": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    "a list": b"[]",
    "null": b"null",
    "too large": b" " * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("kind", HOSTILE_FILES)
def test_hostile_file_is_a_model_error(kind: str, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(HOSTILE_FILES[kind])
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path)


def test_folder_without_config_is_a_model_error(tmp_path: Path):
    with pytest.raises(ModelError, match=r"cannot read .*config\.json .*a model folder needs a config\.json"):
        ModelConfig.from_file(tmp_path)


def _paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, child in children for deeper in _paths(child, (*path, key)))]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**30, 0.0, 1e-30, float("nan"), float("inf"), -float("inf")]),
    st.floats(),
    st.text(max_size=8),
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
PLACES = {name: _paths(json.loads(path.read_text()))[1:] for name, path in FILES.items()}


@given(data=st.data())
@settings(max_examples=400)
def test_any_change_to_a_config_is_valid_or_a_model_error(data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(FILES)))
    changed = values(name)
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(PLACES[name]))
        try:
            section = changed
            for parent in parents:
                section = section[parent]
            if data.draw(st.booleans()):
                section[last] = data.draw(ANYTHING)
            else:
                del section[last]
        except (KeyError, IndexError, TypeError):  # an earlier change took that place away
            continue
    try:
        read = ModelConfig.from_mapping(changed)
    except ModelError as error:
        assert 10 < len(str(error)) < 1000
    else:
        assert len(read.layers) == changed["text_config"]["num_hidden_layers"]
        assert read.block_tokens % max(read.ratios + (1,)) == 0
