"""Random weights in the real formats, for tests and benchmarks without a checkpoint.

Deterministic by tensor name. Deviations come from the tensor catalogue, so activations stay
healthy through any number of layers and logits vary from token to token.

A tensor (or stack of experts) above `whole_bytes` is not drawn element by element: it is a view of
a strip of random numbers, in which row r of member e begins at element r * stride + e, with
stride >= the number of members. So no two rows begin at the same place and all differ, but
neighbours overlap, and a layer of 384 full-width experts (7 GB) takes some 10 MB, an engram table
of 98 GB takes 0.4 GB. Such views are not contiguous and must not be written to; an op that
repacks them as a whole gives that saving up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.checkpoint.tensors import CODE_RMS, TensorSpec
from deepinfer.errors import CheckpointError

WHOLE_BYTES = 128 * 2**20
ROW_STRIDE = 64  # elements between rows of a strip, where it stays small
MANY_ROWS = 2**20
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}


class DummyWeights:
    """A `Source` of random tensors with the names, dtypes and shapes of a catalogue."""

    def __init__(self, specs: Iterable[TensorSpec], seed: int = 0, whole_bytes: int = WHOLE_BYTES) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._seed, self._whole_bytes = seed, whole_bytes

    def get(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError for a name that is not in the catalogue."""
        return self._draw(self._find(name), self._find(name).shape)

    def stack(self, names: Sequence[str]) -> Tensor:
        """[len(names), ...], drawn as one tensor under its first member's name."""
        spec = self._find(names[0])
        return self._draw(spec, (len(names), *spec.shape))

    def _find(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise CheckpointError(f"the model has no tensor {name!r}")
        return self._specs[name]

    def _draw(self, spec: TensorSpec, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.blake2b(spec.name.encode(), digest_size=8).digest()
        random = np.random.default_rng([self._seed, int.from_bytes(digest)])
        dtype = DTYPES[spec.dtype]
        if len(shape) == 1 or math.prod(shape) * dtype.itemsize <= self._whole_bytes:
            return _numbers(random, spec, math.prod(shape)).view(dtype).reshape(shape)
        *members, rows, columns = shape
        num_members = math.prod(members)
        stride = max(num_members, ROW_STRIDE if rows <= MANY_ROWS else 1)
        strip = _numbers(random, spec, num_members + (rows - 1) * stride + columns).view(dtype)
        return strip.as_strided(shape, (*(1 for _ in members), stride, 1))


def _numbers(random: np.random.Generator, spec: TensorSpec, count: int) -> Tensor:
    """`count` elements of the spec's dtype, one-dimensional, as numbers or bytes."""
    if spec.dtype == "I8":
        return torch.from_numpy(random.integers(0, 256, count, np.uint8))
    if spec.dtype == "F8_E4M3":
        return torch.from_numpy(_normal_codes()[random.integers(0, 256, count, np.uint8)])
    if spec.dtype == "F8_E8M0":
        return torch.from_numpy(_scales(random, spec.std, count))
    numbers = torch.from_numpy(random.standard_normal(count, np.float32))
    return numbers.mul_(spec.std).add_(spec.mean).to(DTYPES[spec.dtype])


def _normal_codes() -> NDArray[np.uint8]:
    """256 e4m3 codes at the quantiles of a normal distribution of deviation CODE_RMS."""
    normal = NormalDist(0.0, CODE_RMS["F8_E4M3"])
    quantiles = torch.tensor([normal.inv_cdf((step + 0.5) / 256) for step in range(256)])
    codes: NDArray[np.uint8] = quantiles.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return codes


def scale_mix(rms: float) -> tuple[int, float]:
    """The power of two below `rms`, and the share of scales at the next one so that their mean square is rms**2."""
    exponent = math.floor(math.log2(rms))
    return exponent, (rms**2 / 4.0**exponent - 1) / 3


def _scales(random: np.random.Generator, rms: float, count: int) -> NDArray[np.uint8]:
    """ue8m0 codes of scales, see `scale_mix`."""
    exponent, share = scale_mix(rms)
    is_upper = random.random(count, np.float32) < share
    return (is_upper + np.uint8(exponent + 127)).astype(np.uint8)
