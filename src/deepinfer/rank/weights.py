"""Random weights of one rank's share, drawn on the device in the checkpoint's formats."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepinfer.checkpoint.dummy import scale_mix
from deepinfer.checkpoint.tensors import CODE_RMS, TensorSpec

SHARED_ROWS = (".engram.embed.weight", ".engram.embed.scale")


class RankWeights:
    """A `Source` that holds one of `num_ranks` parts of every stack of experts and n-gram table, and the rest whole."""

    def __init__(self, specs: Iterable[TensorSpec], num_ranks: int, device: torch.device) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._num_ranks, self._device = num_ranks, device

    def get(self, name: str) -> Tensor:
        """One tensor; of a table the first rows."""
        spec = self._specs[name]
        if not name.endswith(SHARED_ROWS):
            return self._draw(spec, spec.shape)
        return self._draw(spec, (-(-spec.shape[0] // self._num_ranks), *spec.shape[1:]))

    def stack(self, names: Sequence[str]) -> Tensor:
        """The first of these tensors, [ceil(len(names) / ranks), ...]."""
        spec = self._specs[names[0]]
        return self._draw(spec, (-(-len(names) // self._num_ranks), *spec.shape))

    def _draw(self, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        random = torch.Generator(self._device).manual_seed(zlib.crc32(spec.name.encode()))
        if spec.dtype == "I8":
            return torch.randint(-128, 128, shape, generator=random, dtype=torch.int8, device=self._device)
        if spec.dtype == "F8_E8M0":
            return _scales(torch.rand(shape, generator=random, device=self._device), spec.std)
        codes = spec.dtype == "F8_E4M3"
        kind = torch.float32 if spec.dtype == "F32" else torch.bfloat16
        numbers = torch.randn(shape, generator=random, dtype=kind, device=self._device)
        if codes:
            return numbers.mul_(CODE_RMS["F8_E4M3"]).clamp_(-448, 448).to(torch.float8_e4m3fn)
        return numbers.mul_(spec.std).add_(spec.mean)


def _scales(uniform: Tensor, rms: float) -> Tensor:
    """Scales around `rms`, see `scale_mix`."""
    exponent, share = scale_mix(rms)
    return ((uniform < share).to(torch.uint8) + (exponent + 127)).view(torch.float8_e8m0fnu)
