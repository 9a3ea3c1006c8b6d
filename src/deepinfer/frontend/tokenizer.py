"""The tokenizer of a model folder: text to ids, ids to text, and the ids that begin and end a text."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from deepinfer.errors import ModelError, RequestError
from deepinfer.frontend.detokenizer import Detokenizer, TokenTexts

# Spellings that answer parsing needs to see, even where a tokenizer calls them special.
THINK_END, TOOL_MARKUP = "</think>", "｜DSML｜"
MARKUP = ("<think>", THINK_END, TOOL_MARKUP)


class Tokenizer:
    """Byte-level BPE from `tokenizer.json`; V4.1 checkpoints have no other kind.

    eos_ids: tokens that end an answer (generation_config.json, else config.json).
    bos_id: set only if tokenizer_config.json says `add_bos_token`; `encode` then begins with it.
    """

    def __init__(self, folder: Path) -> None:
        """Read a model folder.

        Raises ModelError when tokenizer.json is missing, damaged or not byte-level, or when no
        file names an end-of-sequence token.
        """
        self.file = folder / "tokenizer.json"
        self._hub = _load(self.file)
        self._specials = {token.content for token in self._hub.get_added_tokens_decoder().values() if token.special}
        self.eos_ids = _eos_ids(folder)
        self.bos_id = _bos_id(folder, self._hub)

    @property
    def vocab_size(self) -> int:
        """Ids that have a spelling; the model's own vocabulary may be padded beyond it."""
        return self._hub.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, is_prompt: bool = True) -> list[int]:
        """Ids of a raw text with the full vocabulary: a special spelling in it becomes that token.

        Nothing is added, except to a prompt one BOS at the front if `bos_id` is set and the text
        does not already begin with it. Raises RequestError for text that is not valid Unicode.
        """
        try:
            ids: list[int] = self._hub.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            what = "prompt" if is_prompt else "a text"
            raise RequestError(
                f"{what} holds a lone surrogate and has no UTF-8 form; remove it or replace it with U+FFFD"
            ) from None
        if is_prompt and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids without a spelling give nothing."""
        text: str = self._hub.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, keeps_markup: bool = False) -> Detokenizer:
        """A new incremental decoder that leaves special tokens out.

        keeps_markup: show thinking and tool-call markup also if the tokenizer calls it special.
        """
        return Detokenizer(self._markup_texts if keeps_markup else self._texts)

    def token_bytes(self) -> list[bytes]:
        """What each id adds to a text, b"" for control tokens; tool-call markup counts as text."""
        control = {token.content for token in self._hub.get_added_tokens_decoder().values()} - {TOOL_MARKUP}
        return [self._bytes_of(token_id, control) for token_id in range(self.vocab_size)]

    def id_of(self, spelling: str) -> int | None:
        """The id of one token; None if no token is spelled so."""
        token_id: int | None = self._hub.token_to_id(spelling)
        return token_id

    def spelling(self, token_id: int) -> bytes:
        """What an id stands for, special tokens included; b"" for one without a spelling."""
        return self._bytes_of(token_id, set())

    @cached_property
    def think_end_id(self) -> int | None:
        """The token that ends thinking, if the tokenizer has one."""
        return self.id_of(THINK_END)

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(lambda token_id: self._bytes_of(token_id, self._specials))

    @cached_property
    def _markup_texts(self) -> TokenTexts:
        hidden = self._specials.difference(MARKUP)
        return (
            TokenTexts(lambda token_id: self._bytes_of(token_id, hidden)) if hidden != self._specials else self._texts
        )

    def _bytes_of(self, token_id: int, hidden: set[str]) -> bytes:
        spelling = self._hub.id_to_token(token_id)
        if spelling is None or spelling in hidden:
            return b""
        try:
            return bytes(BYTE_OF[character] for character in spelling)
        except KeyError:  # an added token with characters outside the byte alphabet stands for itself
            return spelling.encode("utf-8")


class NoTokenizer:
    """Stands in where a model has no tokenizer: answers have token ids but no text."""

    file = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    think_end_id: int | None = None

    def encode(self, text: str, *, is_prompt: bool = True) -> list[int]:
        """Raises RequestError: there is nothing to encode with."""
        what = "prompt is" if is_prompt else "a parameter holds"
        raise RequestError(f"{what} the text {text!r:.80}, but this model has no tokenizer; give token ids")

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Nothing: ids have no spelling."""
        return ""

    def id_of(self, spelling: str) -> int | None:
        """None: nothing has a spelling."""
        return None

    def spelling(self, token_id: int) -> bytes:
        """Nothing, as above."""
        return b""

    def detokenizer(self, *, keeps_markup: bool = False) -> Detokenizer:
        """A decoder that gives no text."""
        return Detokenizer(TokenTexts(lambda token_id: b""))


def _byte_alphabet() -> dict[str, int]:
    """The character that spells each byte: itself if printable, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _load(file: Path) -> HubTokenizer:
    decoder = _read_json(file).get("decoder")
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise ModelError(f"decoder of {file} is {kind}; it must be ByteLevel, the only kind that V4.1 checkpoints have")
    try:
        return HubTokenizer.from_file(str(file))
    except Exception as error:  # the tokenizers package raises Exception itself
        raise ModelError(f"{file} cannot be read as a tokenizer ({error}); download it again") from None


def _eos_ids(folder: Path) -> tuple[int, ...]:
    config = _read_json(folder / "config.json", required=False)
    places = (_read_json(folder / "generation_config.json", required=False), config, config.get("text_config"))
    for place in places:
        value = place.get("eos_token_id") if isinstance(place, dict) else None
        ids = value if isinstance(value, list) else [value]
        if ids and all(type(token) is int for token in ids):
            return tuple(ids)
    raise ModelError(
        f"neither generation_config.json nor config.json in {folder} gives eos_token_id (an id or a list of ids); "
        "without it no answer could end"
    )


def _bos_id(folder: Path, hub: HubTokenizer) -> int | None:
    settings = _read_json(folder / "tokenizer_config.json", required=False)
    if not settings.get("add_bos_token"):
        return None
    token = settings.get("bos_token")
    spelling = token.get("content") if isinstance(token, dict) else token
    bos_id: int | None = hub.token_to_id(spelling) if isinstance(spelling, str) else None
    if bos_id is None:
        file = folder / "tokenizer_config.json"
        raise ModelError(f"bos_token of {file} is {token!r}, which tokenizer.json does not know; correct either file")
    return bos_id


def _read_json(file: Path, *, required: bool = True) -> dict[str, Any]:
    if not required and not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; a model folder needs it next to config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds a {type(content).__name__}; it must hold a JSON object")
    return content
