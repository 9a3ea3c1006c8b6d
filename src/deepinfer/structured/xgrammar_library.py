"""xgrammar 0.2.9 behind `library.py`. It is used in helper processes only, see `processes.py`.

The package's `__init__` imports torch and transformers, which are large and not needed for what
its C++ core does. So the core's bindings are loaded without it.

Source: Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine for Large Language
Models", 2024 (arXiv:2411.15100).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import ConfigError, RequestError
from deepinfer.structured.grammar import MAX_SPACES, Grammar
from deepinfer.structured.grammar_graph import check_graph
from deepinfer.structured.library import Masks
from deepinfer.structured.spaces import SpaceLimit

VERSION = "0.2.9"
JSON, BOUNDED = b"json", b"bounded"  # before a grammar's data: its text is JSON; strings in it have a bounded length
ENDED, OPENS_SURROGATE = -4, -3  # states beside those of `SpaceLimit`, to which they are like any in a string
RAW_BYTES = 0  # the vocabulary is given as bytes


class XGrammarMatcher:
    """One answer, see `library.Matcher`.

    What xgrammar allows wrongly is excluded here: the UTF-8 form of a surrogate, at its second byte,
    control characters in JSON strings of bounded length (has_bounds), and many spaces in JSON texts (is_json).
    """

    __slots__ = ("_has_bounds", "_is_json", "_states", "_tables", "handle")

    def __init__(self, handle: Any, tables: _Tables, *, is_json: bool, has_bounds: bool) -> None:
        self.handle, self._tables, self._is_json, self._has_bounds = handle, tables, is_json, has_bounds
        self._states = [0]  # before the first token, after the first, ...: of `SpaceLimit`, or one of `_Tables.states`

    def accept(self, token_id: int) -> bool:
        tables = self._tables
        if token_id in tables.no_text:  # of which xgrammar would write a warning
            return False
        if not self.handle.accept_token(token_id, False):
            return False
        state = tables.spaces.after(self._states[-1], token_id) if self._is_json else 0
        if state is None:
            self.handle.rollback(1)
            return False
        self._states.append(tables.states.get(token_id, state))
        return True

    def fill(self, masks: Masks, row: int) -> None:
        self.handle.fill_next_token_bitmask(masks, row, False)
        self.restrict(masks, row)

    def restrict(self, masks: Masks, row: int) -> None:
        """Take back what the handle's mask allows wrongly."""
        allowed = self._tables.allowed(self._states[-1], self._is_json, self._has_bounds)
        if allowed is not None:
            masks[row] &= allowed

    def rollback(self, count: int) -> None:
        self.handle.rollback(count)
        del self._states[len(self._states) - count :]

    @property
    def is_complete(self) -> bool:
        return bool(self.handle.is_completed())

    @property
    def is_ended(self) -> bool:
        return self._states[-1] == ENDED


class _Tables:
    """What is known of each token.

    no_text: those that no grammar allows. states: what is known behind a token, whatever was before it: that the answer
    is ended, or that the first byte of U+D000 to U+DFFF was written, in a JSON text always in a string.
    """

    def __init__(self, vocabulary: list[bytes], vocab_size: int, end_ids: Sequence[int]) -> None:
        texts = dict(enumerate(vocabulary))
        self.no_text = {token for token in range(vocab_size) if not texts.get(token)} - set(end_ids)
        self.num_words = -(-vocab_size // 32)
        self.states = dict.fromkeys(_matching(vocabulary, rb"(?s).*\xed\Z"), OPENS_SURROGATE)
        self.states |= dict.fromkeys(end_ids, ENDED)
        self.spaces = SpaceLimit(vocabulary, self.num_words, MAX_SPACES)
        self.allowed = lru_cache(maxsize=None)(self._allowed)
        self._is_token = self._without(range(vocab_size, 32 * self.num_words))
        self._no_surrogate = self._without(_matching(vocabulary, rb"[\xa0-\xbf]"))
        self._no_control = self._without(_matching(vocabulary, rb"(?s).*[\x00-\x09\x0b\x0c\x0e-\x1f]"))

    def _allowed(self, state: int, is_json: bool, has_bounds: bool) -> NDArray[np.int32] | None:
        """[words] the tokens that may come whatever the handle says; None when these are all."""
        allowed = self._is_token
        if state == OPENS_SURROGATE:
            allowed = allowed & self._no_surrogate
        if has_bounds:
            allowed = allowed & self._no_control
        if is_json and (few_spaces := self.spaces.mask(state)) is not None:
            allowed = allowed & few_spaces
        return allowed if (allowed != -1).any() else None

    def _without(self, tokens: Iterable[int]) -> NDArray[np.int32]:
        """[words] all tokens but these."""
        flags = np.ones(32 * self.num_words, dtype=np.uint8)
        flags[list(tokens)] = 0
        return np.packbits(flags, bitorder="little").view(np.int32)


def _matching(vocabulary: list[bytes], pattern: bytes) -> list[int]:
    """The tokens whose text begins as the pattern says."""
    matches = re.compile(pattern).match
    return [token for token, text in enumerate(vocabulary) if matches(text)]


class XGrammar:
    """The library for one vocabulary, see `library.GrammarLibrary`.

    vocabulary: bytes of each token id; b"" for tokens that are no text, which no grammar allows.
    vocab_size: ids of the model, which may be padded.
    end_ids: tokens that end an answer.

    Raises ConfigError when the package is not installed or not of version 0.2.9.
    """

    def __init__(self, vocabulary: list[bytes], vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tables = _Tables(vocabulary, vocab_size, end_ids)
        self.num_words = self._tables.num_words
        self._core = _load_core()
        self._array = importlib.import_module("tvm_ffi").Array
        self._vocabulary = self._core.TokenizerInfo(vocabulary, RAW_BYTES, vocab_size, list(end_ids), False)
        self._compiler = self._core.GrammarCompiler(self._vocabulary, 1, False, -1, False)  # one thread, no cache
        self._batch = self._core.BatchGrammarMatcher(1)  # in this thread, so that a forked process has it too

    def compile(self, grammar: Grammar) -> bytes:
        warnings: list[str] = []
        try:
            with _core_warnings(warnings):
                check_graph(grammar.kind, json.loads(str(self._parsed(grammar).serialize_json())))
                compiled = self._compiled(grammar)
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(f"{grammar.kind} cannot be compiled: {_plain(str(error))}") from None
        if warnings:
            raise RequestError(f"{grammar.kind} is not fully enforced: {warnings[0]}")
        rules = [JSON] if grammar.kind == "json_schema" else []
        if grammar.kind in ("json_schema", "structural_tag") and re.search("m(in|ax)Length", grammar.text):
            rules.append(BOUNDED)
        return b" ".join(rules) + b":" + str(compiled.serialize_json()).encode()

    def load(self, data: bytes) -> Any:
        rules, _, text = data.partition(b":")
        return self._core.CompiledGrammar.deserialize_json(text.decode(), self._vocabulary), rules.split()

    def matcher(self, loaded: Any) -> XGrammarMatcher:
        compiled, rules = loaded
        handle = self._core.GrammarMatcher(compiled, None, False, -1, None)
        return XGrammarMatcher(handle, self._tables, is_json=JSON in rules, has_bounds=BOUNDED in rules)

    def fill_all(self, matchers: Sequence[XGrammarMatcher], masks: Masks, rows: Sequence[int]) -> None:
        array = self._array  # lists would be read with a call for each element
        handles = array([matcher.handle for matcher in matchers])
        self._batch.batch_fill_next_token_bitmask(handles, masks, array(rows), False)
        for row, matcher in zip(rows, matchers, strict=True):
            matcher.restrict(masks, row)

    def _parsed(self, grammar: Grammar) -> Any:
        core, text = self._core.Grammar, grammar.text
        if grammar.kind == "json_schema":
            return core.from_json_schema(text, True, None, None, True, None, False, False)
        if grammar.kind == "regex":
            return core.from_regex(text, False)
        return core.from_ebnf(text, "root") if grammar.kind == "ebnf" else core.from_structural_tag(text)

    def _compiled(self, grammar: Grammar) -> Any:
        compiler, text = self._compiler, grammar.text
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(text, True, None, None, True, None, False)
        if grammar.kind == "regex":  # as one automaton: as rules its masks would take a thousand times longer
            return compiler.compile_grammar_from_strings(f"root ::= Regex({json.dumps(text)})", "root")
        if grammar.kind == "ebnf":
            return compiler.compile_grammar_from_strings(text, "root")
        return compiler.compile_structural_tag(text)


def _load_core() -> Any:
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(f"structured outputs need the package xgrammar; pip install xgrammar=={VERSION}")
    package = types.ModuleType("xgrammar")
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules["xgrammar"] = package
    version = importlib.import_module("xgrammar._version").__version__
    if version != VERSION:
        raise ConfigError(f"xgrammar is {version}; structured outputs need {VERSION}, pip install xgrammar=={VERSION}")
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


@contextmanager
def _core_warnings(found: list[str]) -> Iterator[None]:
    """Collect what the C++ core prints on standard error: it is how it says that it ignores something."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            found += re.findall(r"Warning: (.*)", file.read().decode("utf-8", "replace"))


def _plain(message: str) -> str:
    """A message without the C++ source line that it came from."""
    return re.sub(r"^\[[^\]]*\] \S+: (Check failed: )?", "", message.strip())
