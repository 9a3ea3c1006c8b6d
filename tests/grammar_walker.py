"""A grammar library over single bytes, and random answers under its grammars."""

import numpy as np

from deepinfer.structured.grammar import read_structured_outputs
from deepinfer.structured.xgrammar_library import XGrammar

EOS = 256


class Walker:
    """A grammar over single bytes and one end token, for texts and for random answers."""

    def __init__(self):
        self.library = XGrammar([bytes([byte]) for byte in range(256)] + [b""], 257, [EOS])

    def compiled(self, form):
        return self.library.compile(read_structured_outputs(form))

    def matcher(self, form):
        return self.library.matcher(self.library.load(self.compiled(form)))

    def accepts(self, form, text):
        """Whether the grammar takes the text and can end there."""
        matcher = self.matcher(form)
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.is_complete

    def allowed(self, matcher):
        masks = np.zeros((1, self.library.num_words), dtype=np.int32)
        matcher.fill(masks, 0)
        return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))

    def random_text(self, data, random, max_bytes=600):
        """A text drawn byte by byte from the masks; None when it has no end after `max_bytes`."""
        matcher, text = self.library.matcher(data), b""
        while len(text) < max_bytes:
            allowed = self.allowed(matcher)
            printable = allowed[(allowed >= 32) & (allowed < 127)]
            likely = printable if len(printable) and random.random() < 0.9 else allowed
            token = EOS if EOS in allowed and random.random() < 0.5 else int(random.choice(likely))
            assert matcher.accept(token)
            if token == EOS:
                return text.decode()
            text += bytes([token])
        return None

    def texts(self, form, seed=0, count=20):
        data = self.library.load(self.compiled(form))
        random = np.random.default_rng(seed)
        return [text for _ in range(count) if (text := self.random_text(data, random)) is not None]
