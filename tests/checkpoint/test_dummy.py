import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from v41_oracle import Oracle

from deepinfer.checkpoint.dummy import DTYPES, DummyWeights
from deepinfer.checkpoint.tensors import CODE_RMS, TensorSpec
from deepinfer.errors import CheckpointError
from deepinfer.model.v41.names import catalogue
from model_configs import GOLDEN, TESTS, config

BIG = TensorSpec("big", "I8", (300, 128), "p", None, 1.0)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_every_tensor_has_its_dtype_and_shape_and_finite_values():
    source = DummyWeights(catalogue(config("golden")))
    for spec in catalogue(config("golden")):
        tensor = source.get(spec.name)
        assert tensor.dtype == DTYPES[spec.dtype] and tensor.shape == spec.shape, spec.name
        assert spec.dtype == "I8" or tensor.float().isfinite().all(), spec.name


def test_values_depend_on_name_and_seed_only():
    specs = list(catalogue(config("golden")))
    one, same, other = DummyWeights(specs), DummyWeights(reversed(specs)), DummyWeights(specs, seed=1)
    for name in ("embed.weight", "layers.4.attn.wq_b.weight", "layers.4.ffn.experts.3.w1.scale", "layers.0.hc_attn_fn"):
        assert torch.equal(_bytes(one.get(name)), _bytes(same.get(name)))
        assert not torch.equal(_bytes(one.get(name)), _bytes(other.get(name)))
    assert not torch.equal(one.get("layers.4.ffn.experts.0.w1.weight"), one.get("layers.4.ffn.experts.1.w1.weight"))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_plain_numbers_have_the_given_mean_and_deviation(dtype: str):
    values = DummyWeights([TensorSpec("x", dtype, (400, 500), "p", None, 0.2, 0.8)]).get("x").float()
    assert values.mean().item() == pytest.approx(0.8, abs=0.005)
    assert values.std().item() == pytest.approx(0.2, rel=0.02)


@pytest.mark.parametrize("std", [0.003, 0.0156, 0.3, 1.0, 1.9])
def test_scales_have_the_given_root_mean_square(std: float):
    scales = DummyWeights([TensorSpec("x", "F8_E8M0", (400, 500), "p", None, std)]).get("x").float()
    assert scales.square().mean().sqrt().item() == pytest.approx(std, rel=0.02)
    assert scales.unique().numel() <= 2


def test_codes_have_the_root_mean_square_that_scales_count_on():
    fp8 = DummyWeights([TensorSpec("x", "F8_E4M3", (400, 500), "p", None, 1.0)]).get("x").float()
    assert fp8.square().mean().sqrt().item() == pytest.approx(CODE_RMS["F8_E4M3"], rel=0.02)
    codes = DummyWeights([TensorSpec("x", "I8", (400, 500), "p", None, 1.0)]).get("x").view(torch.uint8)
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = e2m1[torch.stack([codes & 7, (codes >> 4) & 7]).long()]
    assert numbers.square().mean().sqrt().item() == pytest.approx(CODE_RMS["I8"], rel=0.02)


def test_big_tensors_are_views_of_a_small_strip_with_distinct_rows():
    source = DummyWeights([BIG], whole_bytes=1024)
    tensor = source.get("big")
    assert tensor.shape == (300, 128) and tensor.stride() == (64, 1)
    assert tensor.untyped_storage().nbytes() == 1 + 299 * 64 + 128
    assert torch.unique(tensor, dim=0).shape[0] == 300


def test_big_stacks_have_distinct_rows_in_every_member():
    specs = [TensorSpec(f"e{i}", "I8", (40, 32), "p", None, 1.0) for i in range(100)]
    stack = DummyWeights(specs, whole_bytes=1024).stack([spec.name for spec in specs])
    assert stack.shape == (100, 40, 32)
    assert torch.unique(stack.reshape(-1, 32), dim=0).shape[0] == 4000
    assert stack.untyped_storage().nbytes() < 100 + 40 * 100 + 32 < stack.numel() // 20


def test_small_stacks_are_whole_tensors():
    specs = [TensorSpec(f"e{i}", "F8_E4M3", (40, 32), "p", None, 1.0) for i in range(3)]
    assert DummyWeights(specs).stack(["e0", "e1", "e2"]).is_contiguous()


def test_unknown_name_is_refused():
    with pytest.raises(CheckpointError, match="no tensor 'small'"):
        DummyWeights([BIG]).get("small")


def test_three_full_width_layers_take_little_memory():
    code = """
from pathlib import Path
from deepinfer.checkpoint.dummy import DummyWeights
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.names import catalogue
from deepinfer.model.v41.weights import ModelWeights
config = ModelConfig.from_file(Path("config-flash.json")).cut((0, 2, 20))
weights = ModelWeights(DummyWeights(catalogue(config)), config)
kept = [weights.embedding(), weights.head()]
for layer in range(3):
    kept += [weights.experts(layer), weights.attention(layer), weights.shared_expert(layer), weights.router(layer)]
assert kept[2].w2.value.shape == (384, 5120, 1152)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # KiB; ru_maxrss starts at the parent's
"""
    environment = {"PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 2**20  # measured 1.1 GB; whole tensors would take 23


def test_model_with_dummy_weights_stays_healthy(tmp_path: Path):
    source = DummyWeights(catalogue(config("golden")))
    save_file(
        {spec.name: source.get(spec.name) for spec in catalogue(config("golden"))}, tmp_path / "model.safetensors"
    )
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    trace: dict[str, torch.Tensor] = {}
    logits = Oracle(tmp_path, "float32").forward(list(range(5, 69)), trace=trace).logits
    assert logits.isfinite().all() and 1 < logits.std().item() < 5
    assert logits.argmax(-1).unique().numel() > 32  # varied: 64 positions
    sizes = [trace[f"layers.{layer}.output"].square().mean().sqrt().item() for layer in range(8)]
    assert min(sizes) > 0.5 and max(sizes) < 2
