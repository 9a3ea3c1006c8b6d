"""Token ids to text, one token at a time, never splitting a character.

Byte-level BPE gives every id a fixed byte string, so text is the concatenation of bytes, decoded
as UTF-8. Bytes that form no character become U+FFFD by the rule that Unicode recommends (one per
maximal invalid part), as `tokenizers` does for a whole sequence; at any point
`add(...) ... add(...) + flush()` equals its `decode` of the same ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TokenTexts(dict[int, "str | bytes"]):
    """What each id adds to the text, worked out on first use.

    A str when the id's bytes are whole characters, else bytes. Ids without text are "".
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | bytes:
        value = self._bytes_of(token_id)
        try:
            self[token_id] = value.decode("utf-8")
        except UnicodeDecodeError:
            self[token_id] = value
        return self[token_id]


class Detokenizer:
    """The text of one sequence.

    starts: for each token added, the index in the text of the first character that it has a byte
        of; the length of the text so far for a token without text.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._pending = b""  # the start of a character whose other bytes have not come
        self._num_chars = 0
        self.starts: list[int] = []

    def add(self, token_id: int) -> str:
        """Take the next token; return the characters that are now complete."""
        own = self._texts[token_id]
        if not self._pending and isinstance(own, str):
            self.starts.append(self._num_chars)
            self._num_chars += len(own)
            return own
        return self._add_bytes(own.encode("utf-8") if isinstance(own, str) else own)

    def add_silent(self) -> None:
        """Take a token that ends the answer and is not part of its text."""
        self.starts.append(self._num_chars + bool(self._pending))

    def flush(self) -> str:
        """The sequence is over: what is left of an incomplete character."""
        rest = self._pending.decode("utf-8", "replace")
        self._pending = b""
        self._num_chars += len(rest)
        return rest

    def _add_bytes(self, own: bytes) -> str:
        is_apart = bool(self._pending) and bool(own) and not _is_sound(self._pending + own[:1])
        self.starts.append(self._num_chars + is_apart)
        data = self._pending + own
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        if not _is_sound(self._pending):  # the codec also waits behind the first half of a surrogate
            text += self._pending.decode("utf-8", "replace")
            self._pending = b""
        self._num_chars += len(text)
        return text


def _is_sound(data: bytes) -> bool:
    """Whether the bytes are one character or the beginning of one; `data` but its last byte is known to be."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.end == len(data)
    return True
