"""The op table: every unit of maths that the model calls, as one documented signature.

A method of `Ops` is a specification; `bind` puts an implementation in its place on a table. The
torch reference (`ops/reference`) implements all of them; a backend replaces what it does better.
An op and the `prepare_*` op that packs its weights are replaced as a pair, since only they know
the packed form.

Letters: T tokens, R rows, m residual streams, H hidden, h heads, D head dimension, E experts,
k chosen, V vocabulary. "Activation" tensors are float32, or whatever the backend's precision
says; the model never looks at their dtype. Formulas: the architecture page `docs/model.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepinfer.ops import layers as composed_layers
from deepinfer.ops import model as composed_model
from deepinfer.ops.batch import Computed, ForwardBatch, TokenBatch
from deepinfer.ops.layers import BoundLayer, LayerInputs, LayerState
from deepinfer.ops.model import ModelParts
from deepinfer.ops.values import Attended, Int32
from deepinfer.ops.values import Mix as Mix
from deepinfer.ops.values import Selection as Selection
from deepinfer.ops.weights import (
    AlignerWeights,
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    EngramWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    IndexerWeights,
    NgramSpec,
    NormWeights,
    PatchWeights,
    RouterWeights,
    VisionBlockWeights,
    Weight,
)

if TYPE_CHECKING:
    from deepinfer.ops.check import OpChecker
    from deepinfer.ops.clock import OpClock

Prepared = Any  # what a prepare op returns; only the ops of its pair look inside


class Ops:
    """One implementation per op; see the module docstring. `name` says where each came from."""

    def __init__(self) -> None:
        self.origin: dict[str, str] = {}
        self.clock: OpClock | None = None  # where ops/clock.py collects their time
        self.checker: OpChecker | None = None  # where ops/check.py collects its verdicts

    # -- embedding and head

    def prepare_embedding(self, weight: Weight, num_streams: int) -> Prepared:
        """Pack the embedding table [V, H] bf16."""
        raise NotImplementedError

    def embed(self, tokens: Tensor, embedding: Prepared) -> tuple[Tensor, Tensor]:
        """tokens [T] int64 -> streams [T, m, H] of the first layer, all equal, and pre [T, m], stream 0 alone."""
        raise NotImplementedError

    def prepare_head(self, head: HeadWeights) -> Prepared:
        """Pack the final norm and the head."""
        raise NotImplementedError

    def head(self, streams: Tensor, pre: Tensor, head: Prepared, out: Tensor | None = None) -> Tensor:
        """Collapse streams [T, m, H] with pre [T, m], norm, multiply: logits [T, V] float32, in `out` if given."""
        raise NotImplementedError

    # -- hyper-connections

    def prepare_hyper(self, hyper: HyperWeights, norm: NormWeights) -> Prepared:
        """Pack the mix weights of a half layer and the norm of its input."""
        raise NotImplementedError

    def hyper_enter(self, streams: Tensor, pre: Tensor, hyper: Prepared) -> tuple[Tensor, Mix]:
        """Input of a half layer: norm(collapse(streams, pre)) [T, H], and the mix of this half.

        streams [T, m, H]; pre [T, m] from the half before (one-hot on stream 0 at the start).
        """
        raise NotImplementedError

    def hyper_leave(self, streams: Tensor, output: Tensor, mix: Mix) -> Tensor:
        """new[j] = post[j] * output + sum_i comb[i, j] * streams[i]: [T, m, H]."""
        raise NotImplementedError

    def hyper_next(self, streams: Tensor, output: Tensor, mix: Mix, hyper: Prepared) -> tuple[Tensor, Tensor, Mix]:
        """From one half layer to the next: the streams that `hyper_leave` gives, and what `hyper_enter` makes of them.

        mix: of the half that is left, whose `pre` collapses the streams; hyper: of the half that is entered.
        """
        raise NotImplementedError

    # -- attention

    def prepare_attention(self, attention: AttentionWeights) -> Prepared:
        """Pack the attention of one layer."""
        raise NotImplementedError

    def attention_inputs(self, x: Tensor, positions: Tensor, attention: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        """Query and window paths.

        x [T, H]; positions [T] int32. Returns the low-rank query rmsnorm(wq_a x) [T, q_rank], the
        rotated query [T, h, D] and the packed window rows rope(rmsnorm(wkv x)) [T, bytes] uint8
        (e4m3 values, then one ue8m0 scale per 32).
        """
        raise NotImplementedError

    def attend(
        self,
        q: Tensor,
        window_rows: Tensor,
        batch: TokenBatch,
        ring: Tensor,
        pages: Tensor | None,
        entries: Tensor | None,
        attention: Prepared,
    ) -> Tensor | Attended:
        """Attention over the last window positions and the selected entries, with a sink; then inverse RoPE.

        q [T, h, D]; window_rows [T, bytes] of this step's tokens. ring [slots, length, bytes]
        uint8: position p of a request lies at p % length and is read for positions before the
        row's start only. A token at p sees positions max(p - window + 1, window_starts) .. p; in a
        batch of blocks (`is_block`) each sees max(row start - window, window_starts) .. the row's end.
        pages [blocks, entries per block, bytes] uint8 (e2m1 codes, low nibble first, then one e4m3
        scale per 16) and entries [T, n] (`Selection.entries`), both None in a window-only layer.
        Returns [T, h, D], the last rope dimensions rotated back by the query's position; as a tensor, or as the
        backend's `project_out` takes it.
        """
        raise NotImplementedError

    def main_rows(self, x: Tensor, positions: Tensor, attention: Prepared) -> Tensor:
        """The packed window rows of `attention_inputs` alone: [T, bytes] uint8."""
        raise NotImplementedError

    def store_window(self, window_rows: Tensor, batch: TokenBatch, ring: Tensor) -> None:
        """Write each row's last `length` window rows into its slot's ring, at position % length."""
        raise NotImplementedError

    def project_out(self, attended: Tensor | Attended, attention: Prepared) -> Tensor:
        """Grouped low-rank output: wo_a per group of heads, then wo_b. [T, h, D], or what `attend` gives -> [T, H]."""
        raise NotImplementedError

    # -- compressed keys and their index

    def prepare_compressor(self, compressor: CompressorWeights) -> Prepared:
        """Pack the compressor and index-key weights of a KV source."""
        raise NotImplementedError

    def compress(
        self,
        x: Tensor,
        batch: TokenBatch,
        compressor: Prepared,
        state: Tensor | None,
        pages: Tensor,
        index_pages: Tensor,
    ) -> None:
        """Write the compressed vectors and index keys of every group that these tokens complete.

        x [T, H]. Group j holds positions j * ratio .. (j + 1) * ratio - 1 and is complete with its
        last. state [slots, length, 2, D] float32 (None at ratio 1): key and score rows of the
        latest positions, at position % length; read for the part of a group that lies before the
        row's start, then updated. pages [blocks, entries, bytes] uint8 as in `attend`; index_pages
        [blocks, entries, bytes] uint8 (e2m1 codes, then one ue8m0 scale per 32). Entry j lies in
        the row's block j // entries.
        """
        raise NotImplementedError

    def prepare_indexer(self, indexer: IndexerWeights) -> Prepared:
        """Pack the index-query weights of an index source."""
        raise NotImplementedError

    def select(
        self,
        x: Tensor,
        low_rank: Tensor,
        batch: TokenBatch,
        indexer: Prepared,
        index_pages: Tensor,
        candidates: Tensor | None,
    ) -> Selection:
        """Pick the top_k compressed entries for each token, ascending; ties go to the lower entry.

        x [T, H], low_rank [T, q_rank]. A token at p sees entries j < (p + 1) // ratio. A candidate
        source also returns its best blocks (block score = best entry; the block of the newest
        visible entry always among them). With `candidates` given, entries outside them count as
        minus infinity: they are picked, lowest first, only when the candidates hold fewer than
        top_k. Scores: sum over heads of weight * relu(q . key).
        """
        raise NotImplementedError

    # -- experts

    def prepare_router(self, router: RouterWeights) -> Prepared:
        """Pack a router."""
        raise NotImplementedError

    def route(self, x: Tensor, is_image: Tensor | None, router: Prepared) -> tuple[Tensor, Tensor]:
        """Choose experts: (chosen [T, k] int32 best first, share [T, k] float32).

        is_image [T] bool selects the image bias; None = all text. Ties go to the lower expert.
        """
        raise NotImplementedError

    def prepare_experts(self, experts: ExpertWeights) -> Prepared:
        """Pack routed experts; the packed form keeps the expert as first dimension."""
        raise NotImplementedError

    def experts(self, x: Tensor, chosen: Tensor, share: Tensor, experts: Prepared) -> Tensor:
        """Sum over the chosen experts of w2(share * swiglu(w1 x, w3 x)): [T, H] float32, fixed order."""
        raise NotImplementedError

    def prepare_shared_expert(self, expert: ExpertWeights) -> Prepared:
        """Pack the shared expert."""
        raise NotImplementedError

    def shared_expert(self, x: Tensor, routed: Tensor, expert: Prepared) -> Tensor:
        """routed + w2(swiglu(w1 x, w3 x)): [T, H]."""
        raise NotImplementedError

    def run_experts(
        self, x: Tensor, chosen: Tensor, share: Tensor, experts: Prepared, shared_expert: Prepared
    ) -> Tensor:
        """`shared_expert` of x and of what `experts` gives: [T, H].

        A backend may run both as one op, of what their prepare ops made.
        """
        raise NotImplementedError

    # -- engram

    def prepare_ngrams(self, spec: NgramSpec) -> Prepared:
        """Pack the hash constants."""
        raise NotImplementedError

    def ngram_rows(self, tokens: Tensor, batch: TokenBatch, ring: Tensor, ngrams: Prepared) -> Tensor:
        """Table rows of the n-grams that end at each token: [layers, T, columns] int64.

        tokens [T] int64. ring [slots, length] int32: the token at position p lies at p % length; read
        for positions before the row's start only. Look-back stops at the start of the sequence and
        at image tokens; from there on the pad id stands in.
        """
        raise NotImplementedError

    def prepare_engram(self, engram: EngramWeights) -> Prepared:
        """Pack the engram of one layer; the table may stay where it is."""
        raise NotImplementedError

    def engram(self, streams: Tensor, rows: Tensor, is_image: Tensor | None, engram: Prepared) -> Tensor:
        """streams + gate * value: [T, m, H]; rows [T, columns] of this layer; image tokens pass unchanged."""
        raise NotImplementedError

    # -- drafts

    def tap(self, streams: Tensor) -> Tensor:
        """Mean over the streams [T, m, H] of a layer's input: [T, H], what the draft head sees of the layer."""
        raise NotImplementedError

    def prepare_draft(self, draft: DraftWeights, head: Prepared) -> Prepared:
        """Pack the draft head; the output matrix is that of `head`, which `prepare_head` gave."""
        raise NotImplementedError

    def draft_main(self, taps: Tensor, draft: Prepared) -> Tensor:
        """Main vectors norm(main_proj(concat of taps)): [T, taps, H] float32 -> [T, H]."""
        raise NotImplementedError

    def draft_head(self, streams: Tensor, pre: Tensor, draft: Prepared) -> tuple[Tensor, Tensor]:
        """Collapsed streams x [T, H] of the last draft block, and the logits head(norm(x)) [T, V] float32."""
        raise NotImplementedError

    def draft_next(self, logits: Tensor, x: Tensor, previous: Tensor, draft: Prepared) -> tuple[Tensor, Tensor]:
        """What the token before a draft adds: logits + markov_head(markov_embed(previous)) [n, V] float32, and
        the confidence [n] float32 before its sigmoid, of x [n, H] and that embedding.

        previous [n] int64.
        """
        raise NotImplementedError

    def draft_likeliest(
        self, logits: Tensor, x: Tensor, previous: Tensor, draft: Prepared
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `best_tokens` [n] int64 and `best_logprobs` [n] float32 give for the logits of `draft_next`, and its
        confidence [n] float32."""
        raise NotImplementedError

    # -- images, one at a time; P patches in reading order, d their width

    def prepare_patches(self, patches: PatchWeights) -> Prepared:
        """Pack the first product."""
        raise NotImplementedError

    def embed_patches(self, pixels: Tensor, patches: Prepared) -> Tensor:
        """pixels [height, width, 3] uint8 of one image -> patches [P, d].

        Sides are multiples of the patch size. A sample x counts (x / 255 - 0.5) / 0.5, rounded to bf16; a patch
        is flattened as channel, row, column.
        """
        raise NotImplementedError

    def prepare_vision_block(self, block: VisionBlockWeights) -> Prepared:
        """Pack one layer of the image encoder."""
        raise NotImplementedError

    def vision_block(self, patches: Tensor, columns: int, block: Prepared) -> Tensor:
        """One layer over the patches [P, d] of one image, `columns` a row: full attention, then SwiGLU.

        Queries and keys are rotated by row (first half of the angles) and column; pairs are the halves of a head.
        """
        raise NotImplementedError

    def prepare_aligner(self, aligner: AlignerWeights) -> Prepared:
        """Pack the last norm and the products behind the merge."""
        raise NotImplementedError

    def align(self, patches: Tensor, columns: int, aligner: Prepared) -> Tensor:
        """w2 gelu(w1 cell) of each cell of merge x merge normed patches, flattened as channel, row, column.

        patches [P, d] -> cells [n * k, H], n and k rounded up, with zeros for patches beyond the edges.
        """
        raise NotImplementedError

    # -- whole layers

    def prepare_layers(self, layers: Sequence[BoundLayer]) -> Prepared:
        """Get a run of layers and their caches ready for `run_layers`."""
        raise NotImplementedError

    def run_layers(self, state: LayerState, inputs: LayerInputs, layers: Prepared) -> LayerState:
        """Pass the tokens through the layers, one after the other, and write their caches.

        What the other ops of this table give when `ops/layers.py` calls them one by one, which
        is also what stands here where no backend offers more. The state's tensors may be overwritten.
        """
        raise NotImplementedError

    def prepare_model(self, parts: ModelParts) -> Prepared:
        """Get a model and its caches ready for `run_model`; `parts.layers` are not prepared yet."""
        raise NotImplementedError

    def run_model(self, inputs: ForwardBatch, taps: Tensor | None, num_lines: int, model: Prepared) -> Computed:
        """Pass the tokens through a whole model: rings, embedding, layers, and the first `num_lines` logits.

        What the other ops of this table give when `ops/model.py` calls them one by one, which is also what stands
        here where no backend offers more. inputs: with one batch for both halves. taps: see `LayerInputs`.
        """
        raise NotImplementedError

    # -- tokens and sampling; `slots` and `positions` [n] int32 are arrays on the host

    def read_tokens(self, ring: Tensor, slots: Int32, positions: Int32) -> Tensor:
        """Tokens [n] int64 at these positions of their slots in the token ring [slots, length] int32."""
        raise NotImplementedError

    def write_tokens(self, token_ids: Tensor, ring: Tensor, slots: Int32, positions: Int32) -> None:
        """Put tokens [n] int64 there."""
        raise NotImplementedError

    def read_table(self, table: Tensor, slots: Int32, columns: int) -> Tensor:
        """The first `columns` entries of these slots' lines [n, columns] of the block table [slots, ...] int32."""
        raise NotImplementedError

    def store_tokens(self, tokens: Tensor, batch: TokenBatch, ring: Tensor) -> None:
        """Write each row's last `length` tokens into its slot's token ring [slots, length] int32."""
        raise NotImplementedError

    def verify(self, token_ids: Tensor, is_usable: Tensor, batch: TokenBatch, ring: Tensor, newest: Tensor) -> None:
        """Write the newest token of each decode row, once its drafts are checked, and its position.

        token_ids [n] int64, is_usable [n] bool: what was drawn after the tokens of the batch's first rows. A row's
        drafts lie in the token ring [slots, length] int32 behind its start. It keeps what was drawn up to the first
        that differs from the draft in its place or is not usable; the last of these is its newest token. It goes into
        the ring, unless the slot is the padding slot, and with its position into newest [2, rows] int32.
        """
        raise NotImplementedError

    def best_tokens(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The id [n] int64 of each row's largest logit, the lower of equal ones, and is_finite [n] bool.

        logits [n, V] float32. A row that holds NaN or +infinity, or no finite number, gives id 0 and is not finite.
        """
        raise NotImplementedError

    def best_logprobs(self, logits: Tensor) -> Tensor:
        """The log-probability [n] float32 of each row's likeliest token; logits [n, V] float32, -inf = excluded."""
        raise NotImplementedError

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """One token per row [n] int64: argmax(logits / temperature + Gumbel noise of (seed, position)).

        logits [n, V] float32, -inf = excluded; temperature [n] float32, 0 = greedy, no noise; seeds
        [n] int64; positions [n] int64, of the token being drawn. Ties go to the lower id. The noise
        of an id depends on (seed, position, id) only, never on the row or the batch.
        """
        raise NotImplementedError


PAIRS: Mapping[str, tuple[str, ...]] = {
    "prepare_embedding": ("embed",),
    "prepare_head": ("head",),
    "prepare_hyper": ("hyper_enter", "hyper_next"),
    "prepare_attention": ("attention_inputs", "main_rows", "attend", "project_out"),
    "prepare_compressor": ("compress",),
    "prepare_indexer": ("select",),
    "prepare_router": ("route",),
    "prepare_experts": ("experts",),
    "prepare_shared_expert": ("shared_expert",),
    "prepare_ngrams": ("ngram_rows",),
    "prepare_engram": ("engram",),
    "prepare_draft": ("draft_main", "draft_head", "draft_next", "draft_likeliest", "prepare_head"),
    "prepare_patches": ("embed_patches",),
    "prepare_vision_block": ("vision_block",),
    "prepare_aligner": ("align",),
    "prepare_layers": ("run_layers",),
    "prepare_model": ("run_model",),
}
OP_NAMES = tuple(name for name, value in vars(Ops).items() if inspect.isfunction(value) and not name.startswith("_"))
WHOLES = ("run_experts", "prepare_layers", "run_layers", "prepare_model", "run_model")
AROUND_LAYERS = ("embed", "head", "ngram_rows", "store_tokens", "best_tokens")  # in a whole model
OUTSIDE_LAYERS = (
    *AROUND_LAYERS, "read_tokens", "write_tokens", "read_table", "verify", "best_logprobs", "draw", "main_rows",
    "draft_main", "draft_head", "draft_next", "draft_likeliest", "embed_patches", "vision_block", "align", *WHOLES,
)  # fmt: skip


def build(layers: Mapping[str, Mapping[str, Callable[..., Any]]]) -> Ops:
    """An op table from named sets of implementations, later sets over earlier ones.

    layers: origin -> {op name: function}, as in {"reference": {...}, "cpu": {...}}.
    Raises ValueError for a name that is no op, a signature that differs from the specification,
    an op that nobody implements, and an op taken from another set than its `prepare_*`.
    Whole layers, models and pairs of experts and shared expert are composed of the table's ops unless the set that
    has an op for them has all of those.
    """
    ops, chosen = Ops(), {}
    for origin, functions in ({"composed": _composed(ops)} | dict(layers)).items():
        for name, function in functions.items():
            _check_signature(origin, name, function)
            chosen[name] = (origin, function)
    inner = [name for name in chosen if not name.startswith("prepare") and name not in OUTSIDE_LAYERS]
    for wholes, parts in (
        (("run_experts",), ["experts", "shared_expert"]),
        (("run_layers", "prepare_layers"), inner),
        (("run_model", "prepare_model"), [*AROUND_LAYERS, "run_layers"]),
    ):
        if {chosen[name][0] for name in parts if name in chosen} != {chosen[wholes[0]][0]}:
            chosen |= {name: ("composed", _composed(ops)[name]) for name in wholes}
    missing = [name for name in OP_NAMES if name not in chosen]
    if missing:
        raise ValueError(f"no implementation of {', '.join(missing)}")
    for prepare, users in PAIRS.items():
        for user in users:
            if chosen[user][0] != chosen[prepare][0]:
                raise ValueError(
                    f"{user} comes from {chosen[user][0]} but {prepare} from {chosen[prepare][0]}; "
                    "an op and its prepare op are replaced together"
                )
    for name, (origin, function) in chosen.items():
        setattr(ops, name, function)
        ops.origin[name] = origin
    return ops


def one_by_one(ops: Ops) -> Ops:
    """A table of the same ops in which wholes are calls of the others, whatever the backend has for them."""
    single = build({"single": {name: getattr(ops, name) for name in OP_NAMES if name not in WHOLES}})
    single.origin.update({name: origin for name, origin in ops.origin.items() if name not in WHOLES})
    return single


def _composed(ops: Ops) -> dict[str, Callable[..., Any]]:
    """Experts, layers and models as calls of the table's other ops."""

    def run_experts(x: Tensor, chosen: Tensor, share: Tensor, experts: Prepared, shared_expert: Prepared) -> Tensor:
        return ops.shared_expert(x, ops.experts(x, chosen, share, experts), shared_expert)

    def prepare_layers(layers: Sequence[BoundLayer]) -> tuple[BoundLayer, ...]:
        return tuple(layers)

    def prepare_model(parts: ModelParts) -> ModelParts:
        return replace(parts, layers=ops.prepare_layers(parts.layers))

    return {
        "run_experts": run_experts,
        "prepare_layers": prepare_layers,
        "run_layers": partial(composed_layers.run_layers, ops),
        "prepare_model": prepare_model,
        "run_model": partial(composed_model.run_model, ops),
    }


def _check_signature(origin: str, name: str, function: Callable[..., Any]) -> None:
    if name not in OP_NAMES:
        raise ValueError(f"{origin} offers {name!r}, which is no op; ops are {', '.join(OP_NAMES)}")
    expected = list(inspect.signature(getattr(Ops, name)).parameters)[1:]
    offered = list(inspect.signature(function).parameters)
    if offered != expected:
        raise ValueError(f"{name} of {origin} takes ({', '.join(offered)}); the table says ({', '.join(expected)})")
