from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.names import catalogue
from deepinfer.model.v41.weights import ModelWeights
from model_configs import GOLDEN, NANO, config


class Recorder:
    """A source that notes which names are asked for."""

    def __init__(self, source: Checkpoint) -> None:
        self.source, self.names = source, []

    def get(self, name: str) -> torch.Tensor:
        self.names.append(name)
        return self.source.get(name)

    def stack(self, names: Sequence[str]) -> torch.Tensor:
        self.names += names
        return self.source.stack(names)


def _read_everything(weights: ModelWeights, model: ModelConfig) -> None:
    weights.embedding(), weights.head()
    for layer in model.layers:
        readers: list[Callable[[int], object]] = [weights.attention_norm, weights.ffn_norm, weights.attention]
        readers += [weights.router, weights.experts, weights.shared_expert]
        readers += [weights.compressor] * layer.owns_kv + [weights.indexer] * layer.owns_index
        readers += [weights.engram] * (layer.engram is not None)
        for read in readers:
            read(layer.index)
        weights.hyper(layer.index, "attn"), weights.hyper(layer.index, "ffn")


@pytest.mark.parametrize(("name", "folder"), [("golden", GOLDEN), ("nano", NANO)])
def test_every_backbone_tensor_is_read_exactly_once(name: str, folder: Path):
    source = Recorder(Checkpoint(folder))
    _read_everything(ModelWeights(source, config(name), folder), config(name))
    backbone = {spec.name for spec in catalogue(config(name)) if spec.part not in ("draft", "draft experts", "vision")}
    assert sorted(source.names) == sorted(backbone)


def test_weights_are_the_files_bits():
    stored = load_file(GOLDEN / "model.safetensors")
    weights = ModelWeights(Checkpoint(GOLDEN), config("golden"), GOLDEN)
    wq_b, experts = weights.attention(4).wq_b, weights.experts(4)
    assert torch.equal(wq_b.value.view(torch.uint8), stored["layers.4.attn.wq_b.weight"].view(torch.uint8))
    assert torch.equal(wq_b.scale.view(torch.uint8), stored["layers.4.attn.wq_b.scale"].view(torch.uint8))
    assert experts.w2.value.shape == (8, 128, 32) and experts.w2.value.dtype == torch.int8
    assert experts.w2.scale.shape == (8, 128, 2) and experts.w2.scale.dtype == torch.float8_e8m0fnu
    assert torch.equal(experts.w2.value[5], stored["layers.4.ffn.experts.5.w2.weight"])
    assert torch.equal(weights.embedding().value, stored["embed.weight"])


def test_layer_settings_come_from_the_config():
    golden = config("golden")
    weights = ModelWeights(Checkpoint(GOLDEN), golden, GOLDEN)
    assert weights.attention(0).rope == golden.window_rope and weights.attention(1).rope == golden.compressed_rope
    assert (weights.attention(0).window, weights.attention(0).num_heads, weights.attention(0).num_groups) == (16, 4, 2)
    assert weights.compressor(1).wgate is not None and weights.compressor(4).wgate is None
    assert [weights.indexer(layer).keeps_candidates for layer in (1, 3, 4, 6)] == [False, False, True, False]
    assert (weights.indexer(6).candidate_blocks, weights.indexer(6).candidate_size) == (4, 8)
    router = weights.router(0)
    assert (router.num_active, router.scaling, router.temperature, router.normalize) == (2, 1.5, 1.0, True)
    assert weights.experts(0).limit == weights.shared_expert(0).limit == 2.0
    assert weights.head().norm.eps == 1e-20


def test_cut_model_reads_the_tensors_of_its_checkpoint_layers():
    stored = load_file(GOLDEN / "model.safetensors")
    cut = config("golden").cut((0, 4, 6))
    weights = ModelWeights(Checkpoint(GOLDEN), cut, GOLDEN)
    _read_everything(weights, cut)
    assert torch.equal(weights.router(2).weight.value, stored["layers.6.ffn.gate.weight"])
    assert weights.engram(1).table.value.shape == (2712, 32)


def test_asking_a_layer_for_what_it_has_not_is_a_broken_invariant():
    weights = ModelWeights(Checkpoint(GOLDEN), config("golden"), GOLDEN)
    with pytest.raises(AssertionError, match="layer 0 is no KV source"):
        weights.compressor(0)
    with pytest.raises(AssertionError, match="layer 2 is no index source"):
        weights.indexer(2)
