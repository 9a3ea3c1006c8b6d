"""Experts' products beside those of humming-kernels, another library of Hopper kernels for e2m1 weights.

    PYTHONPATH=src python benchmarks/ops/hopper_peers.py [--tokens 32,256,1024,4096]

Needs `pip install humming-kernels`, a Hopper card and a CUDA compiler. One layer's six experts of a rank at the
released sizes, each with so many tokens. Both are handed the same e4m3 tokens with one scale each, so sums alone
differ: error is the worst row's relative difference from float64 sums (rounding to bf16 alone: 2e-3). humming has two
forms: sums that stay in the matrix unit's narrow accumulator over the whole width, or leave it every 128 columns, as
ours do. Its batch-invariant choice of tiles is taken in both. Times: medians of replays of a CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import version

import torch
from hopper import GPU, Case, exponents, seconds
from humming.layer import HummingLayer
from torch import Tensor

from deepinfer.backends.cuda.hopper import experts, panels, products, quant
from deepinfer.ops.weights import Weight

EXPERTS, SHAPES = 6, {"gate and up": (4608, 5120), "down": (5120, 2304)}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def widened(weight: Weight) -> Tensor:
    """[E, rows, width] float64."""
    assert weight.scale is not None
    codes = weight.value.view(torch.uint8).long()
    numbers = E2M1.to(GPU)[torch.stack([codes & 15, codes >> 4], -1).flatten(-2)]
    return numbers * weight.scale.double().repeat_interleave(32, -1)


def ours(weight: Weight, x: Tensor, count: int) -> tuple[Callable[[], Tensor], Tensor]:
    """Products of `count` tokens of each expert, which lie one expert after the other in x; and where results lie."""
    packed = products.pack_e2m1(experts.prepare_stack(weight))
    chosen = torch.arange(EXPERTS, dtype=torch.int32, device=GPU).repeat_interleave(count).view(-1, 1)
    places = panels.places_of(chosen, EXPERTS)
    tokens = panels.quantise_panels(x, packed.padded_width, places)
    return lambda: products.products(tokens, packed, places), places.of_pairs.long()


def theirs(weight: Weight, rows: quant.Rows, count: int, group: int) -> Callable[[], Tensor]:
    """The same by humming; group: columns after which sums leave the narrow accumulator, 0 = never."""
    _, num_rows, half = weight.value.shape
    layer = HummingLayer(
        shape_n=num_rows, shape_k=half * 2, weight_config={"quant_method": "mxfp4"}, num_experts=EXPERTS,
        input_config={"dtype": "float8e4m3", "group_size": group}, torch_dtype=torch.bfloat16,
    ).cuda()  # fmt: skip
    assert weight.scale is not None and rows.scale is not None
    layer.load_from_tensors({"weight": weight.value.view(torch.uint8), "weight_scale": weight.scale.view(torch.uint8)})
    layer.transform()
    scale = rows.scale.view(-1, 1).repeat(1, half * 2 // group) if group else rows.scale.view(-1, 1)
    layout = torch.arange(EXPERTS + 1, device=GPU) * count
    options = {"gemm_type": "grouped_contiguous", "use_batch_invariant": True}
    return lambda: layer(rows.values, input_scale=scale, expert_layout=layout, compute_config=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="32,256,1024,4096", help="of each expert")
    counts = [int(count) for count in parser.parse_args().tokens.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, humming {version('humming-kernels')}")
    print(f"{'product':<14}{'tokens':>8}{'by':>34}{'us':>9}{'TFLOP/s':>9}{'error':>10}")
    for name, (num_rows, width) in SHAPES.items():
        codes = torch.randint(0, 256, (EXPERTS, num_rows, width // 2), device=GPU, dtype=torch.uint8)
        weight = Weight(codes.view(torch.int8), exponents(EXPERTS, num_rows, width // 32, base=120))
        wide = widened(weight)
        for count in counts:
            x = torch.randn(EXPERTS * count, width, device=GPU, dtype=torch.bfloat16)
            rows = quant.quantise(x)
            assert rows.scale is not None
            exact = (rows.values.double() * rows.scale.double()[:, None]).view(EXPERTS, count, width)[:, :8]
            expected = (exact @ wide.mT).flatten(0, 1)
            call, places = ours(weight, x, count)
            forms = {"deepinfer": (call, places)}
            for group, form in ((128, "humming, every 128 columns"), (0, "humming, narrow sums")):
                forms[form] = theirs(weight, rows, count, group), torch.arange(EXPERTS * count, device=GPU)
            for form, (call, places) in forms.items():
                found = call()[places].view(EXPERTS, count, num_rows)[:, :8].flatten(0, 1).double()
                error = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
                time = seconds(Case(name, count, [None], lambda _, call=call: call(), 0.0))
                rate = 2e-12 * EXPERTS * count * num_rows * width / time
                print(f"{name:<14}{count:>8}{form:>34}{time * 1e6:>9.1f}{rate:>9.0f}{error:>10.1e}", flush=True)


if __name__ == "__main__":
    main()
