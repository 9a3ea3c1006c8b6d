import json

import pytest

from deepinfer.errors import ModelError
from deepinfer.model.registry import PACKAGES, architecture_of, load_module
from model_configs import NANO, config, values


def test_architecture_leads_to_its_modules():
    name = architecture_of(NANO)
    assert name == "DeepseekV41ForCausalLM"
    assert load_module(name, "config").ModelConfig.from_file(NANO) == config("nano")
    assert load_module(name, "caches").cache_layout(config("nano")).bytes_per_block > 0


@pytest.mark.parametrize("part", ["config", "caches", "names", "weights", "report", "memory_plan"])
def test_every_package_has_every_part(part):
    assert all(load_module(name, part) for name in PACKAGES)


def test_unknown_architecture_lists_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values("nano") | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match=r'architectures is \["LlamaForCausalLM"\]; .* DeepseekV41ForCausalLM'):
        architecture_of(tmp_path)
    with pytest.raises(ModelError, match="architecture is 'LlamaForCausalLM'; this engine runs DeepseekV41ForCausalLM"):
        load_module("LlamaForCausalLM", "config")
