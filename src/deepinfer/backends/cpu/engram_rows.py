"""Engram table rows that the n-grams ending at each token address."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import batch_address, read_cache
from deepinfer.backends.cpu.library import short_native
from deepinfer.backends.cpu.tensors import LONG, POINTER, dense, empty
from deepinfer.errors import ShapeError
from deepinfer.ops.batch import TokenBatch
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import NgramSpec


class NgramsStruct(ctypes.Structure):
    """`struct Ngrams` of native/engram_rows.cpp."""

    _fields_ = (
        ("token_map", POINTER),
        ("multipliers", POINTER),
        ("primes", POINTER),
        ("first_rows", POINTER),
        ("vocab", LONG),
        ("pad", LONG),
        ("image_token", LONG),
        ("layers", LONG),
        ("span", LONG),
        ("heads", LONG),
    )


@dataclass(frozen=True)
class CpuNgrams:
    """Hash constants int64: multipliers [layers, span]; primes, first_rows [layers, span - 1, heads]."""

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    first_rows: Tensor
    struct: NgramsStruct
    address: int
    span: int


def prepare_ngrams(spec: NgramSpec) -> CpuNgrams:
    """Lay out the hash constants beside the token map."""
    token_map = spec.token_map.long().contiguous()
    multipliers = torch.tensor(spec.multipliers, dtype=torch.int64)
    primes = torch.tensor(spec.primes, dtype=torch.int64)
    layers, span = multipliers.shape
    require(tuple(primes.shape[:2]) == (layers, span - 1), "an n-gram spec has one multiplier more than n-gram sizes")
    require(bool((primes > 0).all()), "the primes of an n-gram spec are positive")
    first_rows = primes.flatten(1).cumsum(1).view_as(primes) - primes
    struct = NgramsStruct(
        token_map.data_ptr(), multipliers.data_ptr(), primes.data_ptr(), first_rows.data_ptr(),
        len(token_map), spec.pad, spec.image_token, layers, span, primes.shape[2],
    )  # fmt: skip
    return CpuNgrams(token_map, multipliers, primes, first_rows, struct, ctypes.addressof(struct), span)


def ngram_rows(tokens: Tensor, batch: TokenBatch, ring: Tensor, ngrams: CpuNgrams) -> Tensor:
    """Table rows of the n-grams that end at each token: [layers, T, columns] int64.

    Raises ShapeError when a token is not in the vocabulary.
    """
    tokens = dense("tokens", tokens, (batch.num_tokens,), torch.int64)
    expect("token ring", ring, (None, None))
    need = ngrams.span - 1
    require(ring.shape[1] >= need, f"the token ring holds {ring.shape[1]} tokens; it must hold {need}")
    layers, _, heads = ngrams.primes.shape
    out = empty(layers, batch.num_tokens, need * heads, dtype=np.int64)
    address, _kept = read_cache("token ring", ring, 1, torch.int32)
    if short_native().ngram_rows(ngrams.address, tokens.data_ptr(), batch_address(batch), address, out.data_ptr()):
        raise ShapeError(f"a token of this step or just before it is not one of {len(ngrams.token_map)} known ids")
    return out
