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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepinfer.errors import ConfigError, RequestError
from deepinfer.structured.grammar import Grammar
from deepinfer.structured.grammar_graph import check_graph
from deepinfer.structured.library import Masks

VERSION = "0.2.9"
RAW_BYTES = 0  # the vocabulary is given as bytes
MAX_SPACES = 16  # spaces and line breaks at one place of a JSON text: a line break and seven levels of indentation


class XGrammarMatcher:
    """One answer, see `library.Matcher`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def accept(self, token_id: int) -> bool:
        return bool(self.handle.accept_token(token_id, False))

    def fill(self, masks: Masks, row: int) -> None:
        self.handle.fill_next_token_bitmask(masks, row, False)

    def rollback(self, count: int) -> None:
        self.handle.rollback(count)

    @property
    def is_complete(self) -> bool:
        return bool(self.handle.is_completed())

    @property
    def is_ended(self) -> bool:
        return bool(self.handle.is_terminated())


class XGrammar:
    """The library for one vocabulary, see `library.GrammarLibrary`.

    vocabulary: bytes of each token id; b"" for tokens that are no text, which no grammar allows.
    vocab_size: ids of the model, which may be padded.
    end_ids: tokens that end an answer.

    Raises ConfigError when the package is not installed or not of version 0.2.9.
    """

    def __init__(self, vocabulary: list[bytes], vocab_size: int, end_ids: Sequence[int]) -> None:
        self.num_words = -(-vocab_size // 32)
        self._core = _load_core()
        self._vocabulary = self._core.TokenizerInfo(vocabulary, RAW_BYTES, vocab_size, list(end_ids), False)
        self._compiler = self._core.GrammarCompiler(self._vocabulary, 1, False, -1, False)  # one thread, no cache

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
        return str(compiled.serialize_json()).encode()

    def load(self, data: bytes) -> Any:
        return self._core.CompiledGrammar.deserialize_json(data.decode(), self._vocabulary)

    def matcher(self, loaded: Any) -> XGrammarMatcher:
        return XGrammarMatcher(self._core.GrammarMatcher(loaded, None, False, -1, None))

    def accept_all(self, matchers: Sequence[XGrammarMatcher], token_ids: Sequence[int]) -> list[bool]:
        handles = [matcher.handle for matcher in matchers]
        accepted = self._core.BatchGrammarMatcher.batch_accept_token(handles, list(token_ids), False)
        return [bool(value) for value in accepted]

    def fill_all(self, matchers: Sequence[XGrammarMatcher], masks: Masks) -> None:
        handles = [matcher.handle for matcher in matchers]
        self._core.BatchGrammarMatcher(1).batch_fill_next_token_bitmask(handles, masks, None, False)

    def _parsed(self, grammar: Grammar) -> Any:
        core, text = self._core.Grammar, grammar.text
        if grammar.kind == "json_schema":
            return core.from_json_schema(text, True, None, None, True, MAX_SPACES, False, False)
        if grammar.kind == "regex":
            return core.from_regex(text, False)
        return core.from_ebnf(text, "root") if grammar.kind == "ebnf" else core.from_structural_tag(text)

    def _compiled(self, grammar: Grammar) -> Any:
        compiler, text = self._compiler, grammar.text
        if grammar.kind == "json_schema":
            return compiler.compile_json_schema(text, True, None, None, True, MAX_SPACES, False)
        if grammar.kind == "regex":
            return compiler.compile_regex(text)
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
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # the bindings would load it if they could
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
