"""A model with its draft head over caches of its own, without engine; and a head that knows the answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer import LLM
from deepinfer.cache.pools import CachePools
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.model.v41.caches import cache_layout
from deepinfer.model.v41.config import ModelConfig
from deepinfer.model.v41.model import Model
from deepinfer.model.v41.weights import ModelWeights
from deepinfer.ops.batch import ForwardBatch, TokenBatch
from deepinfer.ops.table import Ops
from deepinfer.ops.values import DrawKeys
from deepinfer.runner.speculation import Speculation
from ops.world import make_batch


class Drafting:
    """One request in slot 1, its blocks 1, 2, ... in order."""

    def __init__(self, folder: Path, ops: Ops, num_drafts: int | None = None, max_tokens: int = 256):
        config = ModelConfig.from_file(folder)
        assert config.draft is not None
        self.config, self.num_drafts = config, num_drafts or config.draft.block_size
        model = Model(config, ops, ModelWeights(Checkpoint(folder), config, folder), drafts=True)
        layout = cache_layout(config, self.num_drafts)
        num_blocks = -(-max_tokens // layout.block_tokens)
        self.bound = model.bind(CachePools(layout, num_blocks, 1, torch.device("cpu")))
        self.block_tokens, self.tables = layout.block_tokens, {1: list(range(1, num_blocks + 1))}

    def forward(self, tokens: list[int], start: int) -> Tensor:
        """Logits [n, vocab] of tokens at start, start + 1, ..."""
        batch = make_batch([(1, start, len(tokens))], tables=self.tables, block_tokens=self.block_tokens)
        inputs = ForwardBatch(torch.tensor(tokens), None, batch, batch, None, None, feeds_draft=True)
        return self.bound.compute(inputs, len(tokens)).logits

    def block_batch(self, start: int) -> TokenBatch:
        """A block of drafts whose first place is position `start`."""
        return make_batch([(1, start, self.num_drafts)], block_tokens=self.block_tokens, is_block=True)

    def propose(self, token: int, position: int) -> tuple[list[int], Tensor, Tensor]:
        """Greedy drafts after `token` at `position`, their logits [drafts, vocab] and raw confidences [drafts]."""
        draft = self.bound.draft
        assert draft is not None
        x, logits = draft.block(torch.tensor([token]), self.block_batch(position))
        drafts, rows, confidences, previous = [], [], [], torch.tensor([token])
        for place in range(self.num_drafts):
            row, confidence = draft.next(logits[place : place + 1], x[place : place + 1], previous)
            previous = row.argmax(-1)
            drafts.append(int(previous))
            rows.append(row)
            confidences.append(confidence)
        return drafts, torch.cat(rows), torch.cat(confidences)


class Oracle:
    """A draft head that knows the answer to one prompt."""

    def __init__(self, prompt: list[int], answer: list[int], vocab_size: int):
        self.tokens, self.vocab_size = prompt + answer, vocab_size

    def block(self, tokens: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        logits = torch.zeros(batch.num_tokens, self.vocab_size)
        for line, position in enumerate(batch.positions.tolist()):
            if position + 1 < len(self.tokens):
                logits[line, self.tokens[position + 1]] = 1e4
        return torch.zeros(batch.num_tokens, 1), logits

    def next(self, logits: Tensor, x: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        return logits, torch.zeros(len(logits))

    def draft(self, tokens: Tensor, batch: TokenBatch, keys: DrawKeys | None) -> tuple[Tensor, Tensor]:
        """The answer, which noise does not change."""
        _, logits = self.block(tokens, batch)
        drafts = logits.argmax(-1).unflatten(0, (len(tokens), -1))
        return drafts, torch.zeros(len(tokens), 2, drafts.shape[1])


def with_oracle(llm: LLM, prompt: list[int], answer: list[int]) -> Speculation:
    """Have the engine propose this answer, whatever it is asked."""
    speculation = llm._client.core.executor.speculation
    speculation._drafts._head = Oracle(prompt, answer, llm.vocab_size)
    return speculation


def relative(ours: Tensor, expected: Tensor) -> np.ndarray:
    """Relative difference of each row, in the euclidean norm."""
    difference = (ours.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    return difference.numpy()
