"""KnownAnswers: the tokens of earlier answers, so that the next turn's prompt goes on from them token for token.

A conversation comes back as text. Encoded anew, the text of an answer can fall into other tokens than
those that the model wrote (above all under a grammar), and then nothing behind them could be reused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import Int32

ASSISTANT = "<｜Assistant｜>"
MAX_ANSWERS = 4096
MAX_TOKENS = 2**21  # of all remembered answers; prompts are kept as digests


class KnownAnswers:
    """The last answers that ended by themselves; the oldest are forgotten. `restored` may run beside `add`."""

    def __init__(self, tokenizer: Tokenizer | NoTokenizer) -> None:
        self._tokenizer = tokenizer
        self._assistant = tokenizer.id_of(ASSISTANT)
        self._answers: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._num_tokens = 0

    def add(self, prompt: Int32, answer: Sequence[int]) -> None:
        """Remember an answer, if it ended with an end-of-sequence token and is behind a turn's opening."""
        if self._assistant is None or len(prompt) < 2 or prompt[-2] != self._assistant:
            return
        if not answer or answer[-1] not in self._tokenizer.eos_ids:
            return
        key = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        self._num_tokens += len(answer) - len(self._answers.pop(key, ()))
        self._answers[key] = tuple(answer)
        while len(self._answers) > MAX_ANSWERS or self._num_tokens > MAX_TOKENS:
            self._num_tokens -= len(self._answers.popitem(last=False)[1])

    def restored(self, token_ids: list[int]) -> list[int]:
        """The prompt with the tokens of known answers in place of others with the same text."""
        if self._assistant is None or not self._answers:
            return token_ids
        ids = np.array(token_ids, dtype=np.int32)
        ends = np.flatnonzero(np.isin(ids, self._tokenizer.eos_ids))
        digest, result, start = hashlib.blake2b(digest_size=16), list[Int32](), 0
        for opening in np.flatnonzero(ids == self._assistant).tolist():
            begin = opening + 2  # behind the token that opens or closes the thinking
            if begin < start or (after := ends[np.searchsorted(ends, begin) :]).size == 0:
                continue
            end = int(after[0]) + 1
            result.append(ids[start:begin])
            digest.update(ids[start:begin].tobytes())
            known = self._answers.get(digest.copy().digest())
            old = ids[begin:end]
            if known is not None and self._spelled(known) == self._spelled(old.tolist()):
                old = np.array(known, dtype=np.int32)
            result.append(old)
            digest.update(old.tobytes())
            start = end
        return np.concatenate([*result, ids[start:]]).tolist()  # type: ignore[no-any-return]

    def _spelled(self, ids: Sequence[int]) -> bytes:
        return b"".join(map(self._tokenizer.spelling, ids))
