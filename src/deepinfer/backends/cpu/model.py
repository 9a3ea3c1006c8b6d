"""A whole model as one native call."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.backends.cpu.batch import write_cache
from deepinfer.backends.cpu.layers import CpuLayers, prepare_layers, step_inputs
from deepinfer.backends.cpu.library import native
from deepinfer.backends.cpu.tensors import LONG, POINTER, dense, empty, result
from deepinfer.errors import ShapeError
from deepinfer.ops.batch import Computed, ForwardBatch, Hidden
from deepinfer.ops.layers import LayerInputs
from deepinfer.ops.model import ModelParts
from deepinfer.ops.reference.shapes import expect, require


class ModelStruct(ctypes.Structure):
    """`struct Model` of native/model.cpp."""

    _fields_ = (
        ("ngrams", POINTER),
        ("token_ring", POINTER),
        ("embedding", POINTER),
        ("layers", POINTER),
        ("head", POINTER),
        ("vocabulary", LONG),
        ("hidden", LONG),
        ("num_streams", LONG),
        ("num_layers", LONG),
    )


class GivenStruct(ctypes.Structure):
    """`struct Given` of native/model.cpp."""

    _fields_ = (("tokens", POINTER), ("image_rows", POINTER), ("lines", POINTER), ("num_lines", LONG))


ERRORS = {
    1: "a token of this step or just before it is not in the vocabulary",
    2: "n-gram rows point outside of an engram table",
    3: "a logit token is not one of the step's tokens",
}


@dataclass(frozen=True)
class CpuModel:
    """A model; `struct` points into what `parts` and `layers` hold."""

    parts: ModelParts
    layers: CpuLayers
    struct: ModelStruct
    address: int


def prepare_model(parts: ModelParts) -> CpuModel:
    """Describe the model to native code. Raises ShapeError for caches that do not fit it."""
    layers, ngrams, embedding = prepare_layers(parts.layers), parts.ngrams, parts.embedding
    ring = write_cache("token ring", parts.token_ring, 1, torch.int32)
    if ngrams is not None:
        length, need = parts.token_ring.shape[1], ngrams.span - 1
        require(length >= need, f"the token ring holds {length} tokens; it must hold {need}")
    struct = ModelStruct(
        None if ngrams is None else ngrams.address, ring, embedding.table.data_ptr(), layers.address,
        parts.head.address, *embedding.table.shape, embedding.num_streams, len(parts.layers),
    )  # fmt: skip
    return CpuModel(parts, layers, struct, ctypes.addressof(struct))


def run_model(inputs: ForwardBatch, taps: Tensor | None, num_lines: int, model: CpuModel) -> Computed:
    """Logits [num_lines, V] float32 of the first logit tokens, and what the head reads of all if there are more.

    Raises ShapeError for what `ERRORS` names.
    """
    num_tokens, struct, lines, image_rows = inputs.encoder.num_tokens, model.struct, inputs.logit_tokens, None
    tokens = dense("tokens", inputs.tokens, (num_tokens,), torch.int64)
    num_logits = num_tokens if lines is None else len(lines)
    require(num_lines <= num_logits, f"{num_lines} lines of logits are wanted; there are {num_logits}")
    if lines is not None:
        lines = dense("logit tokens", lines, (num_logits,), torch.int64)
    if inputs.image_rows is not None:
        expect("image rows", inputs.image_rows, (None, struct.hidden))
        num_rows, num_places = len(inputs.image_rows), 0 if inputs.is_image is None else int(inputs.is_image.sum())
        require(num_rows == num_places, f"there are {num_rows} image rows for {num_places} image tokens")
        image_rows = inputs.image_rows.float().contiguous()
    step, _kept = step_inputs(LayerInputs(inputs.encoder, None, inputs.is_image, taps))
    given = GivenStruct(
        tokens.data_ptr(), None if image_rows is None else image_rows.data_ptr(),
        None if lines is None else lines.data_ptr(), num_lines,
    )  # fmt: skip
    streams_address = pre_address = None
    if num_logits > num_lines:
        streams, pre = empty(num_tokens, struct.num_streams, struct.hidden), empty(num_tokens, struct.num_streams)
        streams_address, pre_address = streams.data_ptr(), pre.data_ptr()
    logits = result("logits", inputs.logits, (num_lines, model.parts.head.matrix.rows))
    token_ids, is_finite = empty(num_lines, dtype=np.int64), empty(num_lines, dtype=np.bool_)
    error = native().run_model(
        model.address, ctypes.addressof(step), ctypes.addressof(given), streams_address, pre_address,
        logits.data_ptr(), token_ids.data_ptr(), is_finite.data_ptr(),
    )  # fmt: skip
    if error:
        raise ShapeError(ERRORS[error])
    hidden = None
    if num_logits > num_lines:
        hidden = Hidden(streams, pre) if lines is None else Hidden(streams[lines], pre[lines])
    return Computed(hidden, logits, (token_ids, is_finite))
