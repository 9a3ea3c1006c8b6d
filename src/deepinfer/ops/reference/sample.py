"""Drawing a token: greedy, or by the Gumbel-max trick with noise from a counter-based hash.

The noise of an id is a pure function of (seed, position, id): SplitMix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014) as a counter-based generator, in
wrapping int64 arithmetic, which is the same on every device and torch version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.ops.reference.numerics import Numerics
from deepinfer.ops.reference.shapes import expect

TILE_BYTES = 64 << 20  # noise that is held at a time
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as signed 64-bit numbers
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def best_tokens(numerics: Numerics, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The id [n] int64 of each row's largest logit, the lower of equal ones, and is_finite [n] bool; else id 0."""
    expect("logits", logits, (None, None), torch.float32)
    best, token_ids = logits.max(-1)  # the first of equal values; NaN is the largest
    is_finite = best.isfinite()
    return token_ids.where(is_finite, 0), is_finite


def best_logprobs(numerics: Numerics, logits: Tensor) -> Tensor:
    """The log-probability [n] float32 of each row's likeliest token."""
    return logits.amax(-1) - logits.logsumexp(-1)


def draw(numerics: Numerics, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """argmax(logits / temperature + noise) per row [n] int64, ties to the lower id; temperature 0: no noise.

    A row whose logits hold NaN gives id 0, which means nothing.
    """
    expect("logits", logits, (None, None), torch.float32)
    for name, tensor in (("temperature", temperature), ("seeds", seeds), ("positions", positions)):
        expect(name, tensor, (logits.shape[0],))
    is_random = temperature > 0
    tokens = lowest_argmax(logits)
    chosen = is_random.nonzero().squeeze(1)
    step = max(1, TILE_BYTES // (8 * max(1, logits.shape[1])))
    for part in chosen.split(step):
        scores = logits[part].double().div_(temperature[part].double().unsqueeze(1))
        scores.add_(gumbel_noise(seeds[part], positions[part], logits.shape[1]))
        tokens[part] = lowest_argmax(scores)
    return tokens


def lowest_argmax(scores: Tensor) -> Tensor:
    """Column of the largest score of each row, the lowest where several are equal: [n] int64."""
    best = scores.amax(-1, keepdim=True)
    column = torch.arange(scores.shape[-1], device=scores.device)
    lowest = torch.where(scores == best, column, scores.shape[-1]).amin(-1)
    return lowest.masked_fill_(lowest == scores.shape[-1], 0)


def gumbel_noise(seeds: Tensor, positions: Tensor, num_ids: int) -> Tensor:
    """-log(-log(u)) with u of (seed, position, id): [n, ids] float64, finite."""
    return uniform(seeds, positions, num_ids).log_().neg_().log_().neg_()


def uniform(seeds: Tensor, positions: Tensor, num_ids: int) -> Tensor:
    """52 random bits and a half, so strictly inside (0, 1): [n, ids] float64."""
    key = _mix(_mix(seeds.long() + GOLDEN_GAMMA) + positions.long() * GOLDEN_GAMMA)
    counter = torch.arange(1, num_ids + 1, dtype=torch.int64, device=seeds.device) * GOLDEN_GAMMA
    bits = _mix(key.unsqueeze(1) + counter)
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 on int64 bits, wrapping."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift: zeros come in from the left."""
    return (x >> count) & ((1 << (64 - count)) - 1)
