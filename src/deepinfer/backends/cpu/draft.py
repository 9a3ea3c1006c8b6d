"""The draft head around its blocks; see ops/reference/draft.py for the maths."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.backends.cpu.embedding import CpuHead, HeadStruct, head
from deepinfer.backends.cpu.hyper import MAX_STREAMS
from deepinfer.backends.cpu.library import native, short_native
from deepinfer.backends.cpu.matrix import TO_FP8, Matrix, MatrixStruct, prepare_matrix
from deepinfer.backends.cpu.tensors import FLOAT, POINTER, dense, empty, numbers, rows_of
from deepinfer.backends.cpu.tokens import best_logprobs, best_tokens
from deepinfer.errors import ShapeError
from deepinfer.ops.reference.shapes import expect, require
from deepinfer.ops.weights import DraftWeights

SHORT_TOKENS = 16  # up to so many, main vectors take less time than to get the GIL back


class DraftStruct(ctypes.Structure):
    """`struct Draft` of native/draft.cpp."""

    _fields_ = (
        ("main_proj", MatrixStruct),
        ("markov_head", MatrixStruct),
        ("confidence", MatrixStruct),
        ("main_norm", POINTER),
        ("markov_embed", POINTER),
        ("main_eps", FLOAT),
    )


@dataclass(frozen=True)
class CpuDraft:
    """Head and projections of the draft head. held: what the struct points into."""

    head: CpuHead
    held: tuple[Matrix | Tensor, ...]
    struct: DraftStruct
    address: int


def tap(streams: Tensor) -> Tensor:
    """Mean over the streams [T, m, H]: [T, H] float32."""
    num_tokens, num_streams, hidden = streams.shape
    require(num_streams <= MAX_STREAMS, f"there are {num_streams} streams; there must be at most {MAX_STREAMS}")
    streams, out = dense("streams", streams, (num_tokens, num_streams, hidden)), empty(num_tokens, hidden)
    native().tap(streams.data_ptr(), num_tokens, num_streams, hidden, out.data_ptr(), hidden)
    return out


def prepare_draft(draft: DraftWeights, head: CpuHead) -> CpuDraft:
    """Pack the weights; the output matrix is the one that `head` holds."""
    norm, main_norm = numbers(draft.norm.weight.value), numbers(draft.main_norm.weight.value)
    expect("draft norm", norm, (head.matrix.columns,))
    main_proj = prepare_matrix(draft.main_proj, rounding=TO_FP8)
    markov_head, confidence = prepare_matrix(draft.markov_head), prepare_matrix(draft.confidence)
    embed = draft.markov_embed.value.contiguous()
    expect("draft main norm", main_norm, (main_proj.rows,))
    expect("markov embedding", embed, (markov_head.rows, markov_head.columns), torch.bfloat16)
    require(
        (confidence.rows, confidence.columns) == (1, head.matrix.columns + markov_head.columns),
        f"the confidence matrix is {confidence.rows} x {confidence.columns}; "
        f"it must be 1 x {head.matrix.columns} + {markov_head.columns}",
    )
    head_struct = HeadStruct(head.matrix.structs[0], norm.data_ptr(), draft.norm.eps)
    struct = DraftStruct(
        *(matrix.structs[0] for matrix in (main_proj, markov_head, confidence)),
        main_norm.data_ptr(), embed.data_ptr(), draft.main_norm.eps,
    )  # fmt: skip
    return CpuDraft(
        head=CpuHead(head.matrix, norm, head_struct, ctypes.addressof(head_struct)),
        held=(main_proj, markov_head, confidence, main_norm, embed),
        struct=struct,
        address=ctypes.addressof(struct),
    )


def draft_main(taps: Tensor, draft: CpuDraft) -> Tensor:
    """Main vectors [T, H] float32 of taps [T, taps, H]."""
    expect("taps", taps, (None, None, None), torch.float32)
    matrix, num_tokens = draft.struct.main_proj, len(taps)
    taps = dense("taps", taps.flatten(1), (num_tokens, matrix.columns))
    out = empty(num_tokens, matrix.rows)
    library = short_native() if num_tokens <= SHORT_TOKENS else native()
    library.draft_main(draft.address, taps.data_ptr(), num_tokens, out.data_ptr())
    return out


def draft_head(streams: Tensor, pre: Tensor, draft: CpuDraft) -> tuple[Tensor, Tensor]:
    """x [T, H] and logits [T, V] float32 of streams [T, m, H] collapsed with pre [T, m]."""
    return (streams * pre.unsqueeze(-1)).sum(1), head(streams, pre, draft.head)


def draft_next(logits: Tensor, x: Tensor, previous: Tensor, draft: CpuDraft) -> tuple[Tensor, Tensor]:
    """Logits [n, V] with the Markov term of the previous tokens [n] int64, and raw confidences [n].

    Raises ShapeError for a token that the embedding does not have.
    """
    num_rows, vocabulary = len(logits), draft.struct.markov_head.rows
    expect("previous", previous, (num_rows,))
    previous = dense("previous", previous, (num_rows,), torch.int64)
    logits, x = rows_of("logits", logits, vocabulary), rows_of("x", x, draft.head.matrix.columns)
    expect("x", x, (num_rows, None))
    out, confidence = empty(num_rows, vocabulary), empty(num_rows)
    if short_native().draft_next(
        draft.address, logits.data_ptr(), logits.stride(0), x.data_ptr(), x.stride(0), previous.data_ptr(), num_rows,
        out.data_ptr(), confidence.data_ptr(),
    ):  # fmt: skip
        raise ShapeError(f"tokens reach from {previous.min()} to {previous.max()}; they must be ids below {vocabulary}")
    return out, confidence


def draft_likeliest(logits: Tensor, x: Tensor, previous: Tensor, draft: CpuDraft) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens [n] int64 of such logits, their log-probabilities and the raw confidences [n]."""
    row, confidence = draft_next(logits, x, previous, draft)
    return best_tokens(row)[0], best_logprobs(row), confidence
