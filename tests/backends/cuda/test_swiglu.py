"""SwiGLU between two products: rounded as rows are, to rows and to panels, at widths of one tile or two."""

from __future__ import annotations

import pytest
import torch

from backends.cuda import packed as layout
from backends.cuda import pair

swiglu = pytest.importorskip("deepinfer.backends.cuda.hopper.swiglu", reason="triton is not installed")
panels = pytest.importorskip("deepinfer.backends.cuda.hopper.panels", reason="triton is not installed")
quant = pytest.importorskip("deepinfer.backends.cuda.hopper.quant", reason="triton is not installed")


@pytest.mark.parametrize("inner", [32, 96, 256, 288, 2304])
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_rows_and_panels_hold_the_rounded_product(inner: int, limit: float) -> None:
    random = torch.Generator().manual_seed(inner)
    both, share = 2 * torch.randn(9, 2 * inner, generator=random).bfloat16(), torch.rand(9, generator=random)
    both[3, : inner // 2] *= 8
    gate, up = both.float().split(inner, dim=1)
    if limit:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    wanted = quant.quantise((gate * torch.sigmoid(gate) * up * share.unsqueeze(1)).bfloat16().to(pair.DEVICE))
    placed, weights = both.to(pair.DEVICE), share.to(pair.DEVICE)
    rows = swiglu.swiglu(placed, weights, limit)
    assert torch.equal(rows.scale, wanted.scale)
    ours, theirs = (codes.view(quant.E4M3).float() for codes in (rows.values, wanted.values))
    assert (ours - theirs).abs().max() <= theirs.abs().max() / 8 and (ours != theirs).float().mean() < 0.01
    padded = -(-inner // 256) * 256
    tokens = swiglu.swiglu_panels(placed, weights, limit, padded)
    found = layout.panel_bytes(tokens, padded // 128)[:9]
    assert torch.equal(found[:, :inner], rows.values.view(torch.uint8)) and not found[:, inner:].any()
    assert torch.equal(tokens.scale[:9], rows.scale)


def test_lines_of_pairs_are_read_and_written_at_their_places() -> None:
    chosen = torch.tensor([[1, 0], [1, 2], [0, 1]], dtype=torch.int32, device=pair.DEVICE)
    places, random = panels.places_of(chosen, 3), torch.Generator().manual_seed(0)
    both = torch.randn(places.size, 2 * 288, generator=random).bfloat16().to(pair.DEVICE)
    share = torch.rand(3, 2, generator=random).to(pair.DEVICE)
    tokens, where = swiglu.swiglu_panels(both, share, 0.0, 512, places), places.of_pairs.long()
    rows = swiglu.swiglu(both[where], share.flatten(), 0.0)
    found = layout.panel_bytes(tokens, 4)[where]
    assert torch.equal(found[:, :288], rows.values.view(torch.uint8)) and not found[:, 288:].any()
    assert torch.equal(tokens.scale[where], rows.scale)
