"""Milliseconds per step for matchers and masks: 64 rows, the released vocabulary's 129,280 tokens.

    PYTHONPATH=src python benchmarks/structured/masks.py [--rows 64] [--steps 200] [--json FILE]

The vocabulary is made up (bytes, JSON punctuation, words; no merges) and of the released size. Half
of the tokens are drawn from all that the masks allow, half from the first 300 of those.

matcher        accept + fill for all rows, in this process: the work of one step, mean processor time. Target: 1 ms
matcher wall   the same on the clock, median
device thread  what the engine's device thread spends on a step whose forward takes 5 ms or more, in
               which the matcher process works
no forward     the same if the forward took no time: the whole way to the matcher process and back
apply          masking the logits [rows, vocab] float32 on this CPU, one thread, mean processor time
compile        all grammars of the case, one after the other
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.messages import SlotSetup
from deepinfer.sampling.masks import exclude_masked
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.matching import MatcherState, Step
from deepinfer.structured.rows import ConstrainedRows
from deepinfer.structured.server import GrammarServer
from deepinfer.structured.xgrammar_library import XGrammar

VOCAB_SIZE, END = 129_280, 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
        "kind": {"enum": ["first", "second", "third"]},
        "notes": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
    },
    "required": ["name", "age", "tags", "kind", "notes"],
}
CASES = {
    "schema": [{"json": SCHEMA}],
    "json_object": [{"json_object": True}],
    "regex": [{"regex": r"[A-Za-z]+( [A-Za-z]+)*, [0-9]{4}"}],
    "grammar": [{"grammar": 'root ::= term (("+" | "*") term){200}\nterm ::= [0-9]+ | "(" root ")"'}],
    "mixed": [{"json": SCHEMA}, {"json_object": True}, {"regex": r"[A-Za-z]+( [A-Za-z]+)*, [0-9]{4}"}],
}


def spellings() -> list[str]:
    """The made-up vocabulary in byte-level spelling, seeded."""
    random = np.random.default_rng(0)
    letters = list("etaoinshrdlucmfwypvbgkjqxz")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(256 - len(printable))]
    known = dict.fromkeys(["<begin>", "<end>", *alphabet, '{"', '":', '",', 'Ġ"', '":Ġ"', '"},', "ĊĠĠ", '"]', "Ġ{"])
    while len(known) < VOCAB_SIZE:
        word = "".join(random.choice(letters, min(14, 2 + int(random.exponential(4)))))
        kind = random.random()
        if kind < 0.5:
            word = "Ġ" + word
        elif kind < 0.6:
            word = word.capitalize()
        elif kind < 0.65:
            word = str(int(random.integers(10_000)))
        elif kind < 0.7:
            word += str(random.choice(list('",.:;(){}[]_-')))
        elif kind < 0.8:  # a character of three bytes
            word = "".join(alphabet[printable.index(byte)] for byte in (0xE4, *random.integers(0xAE, 0xC0, 2)))
        known[word] = None
    return list(known)


def write_model(folder: Path) -> None:
    vocabulary = {spelling: number for number, spelling in enumerate(spellings())}
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": n, "content": text, **special} for n, text in enumerate(("<begin>", "<end>"))],
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))


def draw(bits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """One allowed token per row."""
    tokens = []
    for line in bits:
        allowed = np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != END] if len(allowed) > 1 else allowed
        tokens.append(random.choice(allowed[:300] if random.random() < 0.5 else allowed))
    return np.array(tokens, dtype=np.int32)


def run(server: GrammarServer, library: XGrammar, forms: list[dict], num_rows: int, num_steps: int) -> dict[str, float]:
    params = [SamplingParams(structured_outputs=forms[i % len(forms)], seed=1) for i in range(num_rows)]
    started = time.perf_counter()
    compiled = [server.compile(one.constraint.grammar).result() for one in params]
    compile_ms = 1000 * (time.perf_counter() - started)
    setups = [
        SlotSetup(slot + 1, params[slot], 0, np.zeros(0, dtype=np.int32), grammar=compiled[slot])
        for slot in range(num_rows)
    ]
    slots, counts = np.arange(1, num_rows + 1, dtype=np.int32), np.ones(num_rows, dtype=np.int32)
    times: dict[str, list[float]] = {name: [] for name in ("matcher", "device thread", "no forward", "apply")}
    walls: list[float] = []
    for name, forward_seconds in (("device thread", 0.005), ("no forward", 0.0)):
        rows, random, logits = (
            ConstrainedRows(server, num_rows),
            np.random.default_rng(0),
            torch.randn(num_rows, VOCAB_SIZE),
        )
        state = MatcherState(library, np.zeros(1 + num_rows * library.num_words, dtype=np.int32))
        state.run(Step(loads=[(one.number, one.data) for one in {one.number: one for one in compiled}.values()]))
        new, tokens = list(range(num_rows)), np.zeros(num_rows, dtype=np.int32)
        for _ in range(num_steps):
            rows.set_slots([setups[slot] for slot in new])
            started = time.perf_counter()
            rows.begin(slots, counts, None)
            sent = time.perf_counter()
            time.sleep(forward_seconds)
            waited = time.perf_counter()
            masks = rows.masks()
            times[name].append(1000 * (sent - started + time.perf_counter() - waited))
            assert masks is not None and not masks.errors
            step = Step(
                opens=[(slot, compiled[slot].number, []) for slot in new],
                accepts=[(slot, int(tokens[slot])) for slot in range(num_rows) if slot not in new],
                fills=[(slot, []) for slot in range(num_rows)],
            )
            started, wall = time.process_time(), time.perf_counter()
            assert state.run(step) == {}
            times["matcher"].append(1000 * (time.process_time() - started))
            walls.append(1000 * (time.perf_counter() - wall))
            assert (state._masks[:num_rows] == masks.bits).all(), "the two ways give different masks"
            started = time.process_time()
            exclude_masked(logits, masks)
            times["apply"].append(1000 * (time.process_time() - started))
            tokens = draw(masks.bits, random)
            rows.take(tokens, slots - 1, counts)
            new = [slot for slot in range(num_rows) if tokens[slot] == END]
    return {
        "matcher": statistics.fmean(times["matcher"]),  # a processor clock may be coarse: no medians of it
        "matcher wall": statistics.median(walls),
        "device thread": statistics.median(times["device thread"]),
        "no forward": statistics.median(times["no forward"]),
        "apply": statistics.fmean(times["apply"]),
        "compile": compile_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        server = GrammarServer(Path(folder), VOCAB_SIZE, [END])
        library = XGrammar(Tokenizer(Path(folder)).token_bytes(), VOCAB_SIZE, [END])
        for name, forms in CASES.items():
            results[name] = run(server, library, forms, options.rows, options.steps)
            print(f"{name:12}", "  ".join(f"{key} {value:7.3f} ms" for key, value in results[name].items()), flush=True)
        server.close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
