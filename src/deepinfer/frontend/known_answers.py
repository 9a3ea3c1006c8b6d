"""KnownAnswers: the tokens of earlier answers, so that the next turn's prompt goes on from them token for token.

A conversation comes back as text. Encoded anew, the text of an answer can fall into other tokens than
those that the model wrote (above all under a grammar), and calls of tools can be written in another text
that means the same (`[1,2]` for `[1, 2]`). Then nothing behind them could be reused.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from deepinfer.frontend.answer import AnswerParser
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import Int32

ASSISTANT, THINK_START = "<｜Assistant｜>", "<think>"
MAX_ANSWERS = 4096
MAX_TOKENS = 2**21  # of all remembered answers; prompts are kept as digests


class KnownAnswers:
    """The last answers that ended by themselves; the oldest are forgotten. `restored` may run beside `add`.

    parser: makes a parser of an answer, given whether that begins with thinking.
    """

    def __init__(self, tokenizer: Tokenizer | NoTokenizer, parser: Callable[[bool], AnswerParser]) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        self._assistant, self._think_start = tokenizer.id_of(ASSISTANT), tokenizer.id_of(THINK_START)
        self._answers: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._num_tokens = 0

    def add(self, prompt: Int32, answer: Sequence[int], salt: str = "") -> None:
        """Remember an answer, if it ended with an end-of-sequence token and is behind a turn's opening.

        salt: only prompts of the same salt get it back.
        """
        if self._assistant is None or len(prompt) < 2 or prompt[-2] != self._assistant:
            return
        if not answer or answer[-1] not in self._tokenizer.eos_ids:
            return
        key = _digest(salt, prompt).digest()
        self._num_tokens += len(answer) - len(self._answers.pop(key, ()))
        self._answers[key] = tuple(answer)
        while len(self._answers) > MAX_ANSWERS or self._num_tokens > MAX_TOKENS:
            self._num_tokens -= len(self._answers.popitem(last=False)[1])

    def restored(self, token_ids: list[int], salt: str = "") -> list[int]:
        """The prompt with the tokens of known answers in place of others with the same text or meaning."""
        if self._assistant is None or not self._answers:
            return token_ids
        ids = np.array(token_ids, dtype=np.int32)
        ends = np.flatnonzero(np.isin(ids, self._tokenizer.eos_ids))
        digest, result, start = _digest(salt), list[Int32](), 0
        for opening in np.flatnonzero(ids == self._assistant).tolist():
            begin = opening + 2  # behind the token that opens or closes the thinking
            if begin < start or (after := ends[np.searchsorted(ends, begin) :]).size == 0:
                continue
            end = int(after[0]) + 1
            result.append(ids[start:begin])
            digest.update(ids[start:begin].tobytes())
            known = self._answers.get(digest.copy().digest())
            old = ids[begin:end]
            if known is not None and self._is_same(
                known, old.tolist(), is_thinking=int(ids[begin - 1]) == self._think_start
            ):
                old = np.array(known, dtype=np.int32)
            result.append(old)
            digest.update(old.tobytes())
            start = end
        return np.concatenate([*result, ids[start:]]).tolist()  # type: ignore[no-any-return]

    def _is_same(self, one: Sequence[int], other: Sequence[int], *, is_thinking: bool) -> bool:
        """Whether two answers say the same."""
        texts = [b"".join(map(self._tokenizer.spelling, ids[:-1])).decode("utf-8", "replace") for ids in (one, other)]
        return texts[0] == texts[1] or self._read(texts[0], is_thinking) == self._read(texts[1], is_thinking)

    def _read(self, text: str, is_thinking: bool) -> tuple[object, ...]:
        parser = self._parser(is_thinking)
        parser.add(text)
        parser.finish()
        return parser.reasoning, parser.content, [(call.name, _value(call.arguments)) for call in parser.tool_calls]


def _digest(salt: str, prompt: Int32 | None = None) -> hashlib.blake2b:
    key = hashlib.blake2b(salt.encode("utf-8", "surrogatepass")).digest()
    return hashlib.blake2b(b"" if prompt is None else prompt.tobytes(), digest_size=16, key=key)


def _value(arguments: str) -> object:
    """What a JSON text means; the text itself if it means nothing."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
