"""`bad_words` as token sequences: each text alone and behind a space, as it may stand at the start or inside."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.errors import RequestError, shown
from deepinfer.frontend.tokenizer import NoTokenizer, Tokenizer
from deepinfer.messages import TokenSequences
from deepinfer.sampling.params import MAX_BAD_WORD_TOKENS


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | NoTokenizer, vocab_size: int) -> TokenSequences:
    """The sequences to exclude, in order and without repeats.

    A sequence that only puts tokens before another one of the same text is left out: whoever
    completes it completes the other. Spellings of a text in other tokens than the tokenizer's own
    are not covered.
    Raises RequestError for a text of too many tokens or none, or with one that the model does not
    have, and without a tokenizer.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        plain, spaced = (tuple(tokenizer.encode(text, is_prompt=False)) for text in (bare, " " + bare))
        longest = max(len(plain), len(spaced))
        if longest > MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words holds {shown(word)}, which has {longest} tokens; at most {MAX_BAD_WORD_TOKENS} are taken"
            )
        if not plain or max(plain + spaced) >= vocab_size:
            raise RequestError(f"bad_words holds {shown(word)}, which this model cannot write; leave it out")
        found[plain] = None
        if spaced[-len(plain) :] != plain:
            found[spaced] = None
    return tuple(found)
