"""Milliseconds per step for matchers and masks: 64 rows, the released vocabulary's 129,280 tokens.

    PYTHONPATH=src python benchmarks/structured/masks.py [--rows 64] [--steps 100] [--json FILE]

The vocabulary is made up (bytes, JSON punctuation, words; no merges) and of the released size. Half
of the tokens are drawn from all that the masks allow, half from the first 300 of those.

Medians, and in brackets the first tenth, which other work on the machine disturbs less.

matcher        accept + fill for all rows, in this process: the work of one step. Target: 1 ms
cold           the same behind work on 8 MiB of other data, after which no cache of the processor knows the grammar
five drafts    the same where each row checks five drafts, all right: accept six tokens, fill six masks
device thread  what the engine's device thread spends on a step whose forward takes 5 ms or more, in
               which the matcher process works
no forward     the same if the forward took no time: the whole way to the matcher process and back
apply          masking the logits [rows, vocab] float32 on this CPU, one thread
compile        all grammars of the case, one after the other
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.messages import SlotSetup
from deepinfer.sampling.masks import exclude_masked
from deepinfer.sampling.params import SamplingParams
from deepinfer.structured.grammar import CompiledGrammar
from deepinfer.structured.matching import MatcherState, Step
from deepinfer.structured.rows import ConstrainedRows
from deepinfer.structured.server import GrammarServer
from deepinfer.structured.xgrammar_library import XGrammar

VOCAB_SIZE, END, NUM_DRAFTS = 129_280, 1, 5
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


def milliseconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - started)


def run(
    server: GrammarServer, library: XGrammar, forms: list[dict], num_rows: int, num_steps: int
) -> dict[str, tuple[float, float]]:
    """Median and first tenth in ms by name."""
    params = [SamplingParams(structured_outputs=forms[i % len(forms)], seed=1) for i in range(num_rows)]
    compiled: list[CompiledGrammar] = []
    times: dict[str, list[float]] = defaultdict(list)
    times["compile"] = [
        milliseconds(lambda: compiled.extend(server.compile(one.constraint.grammar).result() for one in params))
    ]
    nothing = np.zeros(0, dtype=np.int32)
    setups = [SlotSetup(slot + 1, params[slot], 0, nothing, grammar=compiled[slot]) for slot in range(num_rows)]
    slots, counts = np.arange(1, num_rows + 1, dtype=np.int32), np.ones(num_rows, dtype=np.int32)
    rows, random, logits = (
        ConstrainedRows(server, num_rows),
        np.random.default_rng(0),
        torch.randn(num_rows, VOCAB_SIZE),
    )
    state = matcher_state(library, compiled, num_rows)
    new, tokens = list(range(num_rows)), np.zeros(num_rows, dtype=np.int32)
    answers: list[list[tuple[int, list[int]]]] = [[] for _ in range(num_rows)]
    for number in range(num_steps):
        forward_seconds = 0.005 * (number % 2)
        rows.set_slots([setups[slot] for slot in new])
        sent = milliseconds(lambda: rows.begin(slots, counts, None))
        time.sleep(forward_seconds)
        started = time.perf_counter()
        masks = rows.masks()
        waited = 1000 * (time.perf_counter() - started)
        times["device thread" if forward_seconds else "no forward"].append(sent + waited)
        assert masks is not None and not masks.errors
        step = Step(
            opens=[(slot, compiled[slot].number, []) for slot in new],
            accepts=[(slot, int(tokens[slot])) for slot in range(num_rows) if slot not in new],
            fills=[(slot, slot, [], 0) for slot in range(num_rows)],
        )
        times["cold"].append(milliseconds(lambda step=step: state.run(step)))
        assert (state._masks[:num_rows] == masks.bits).all(), "the two ways give different masks"
        if number % 10 == 0:
            times["apply"].append(milliseconds(lambda masks=masks: exclude_masked(logits, masks)))
        tokens = draw(masks.bits, random)
        rows.take(tokens, slots - 1, counts)
        for slot, token in enumerate(tokens.tolist()):
            if slot in new:
                answers[slot].append((compiled[slot].number, []))
            answers[slot][-1][1].append(token)
        new = [slot for slot in range(num_rows) if tokens[slot] == END]
    for name, num_drafts in (("matcher", 0), ("five drafts", NUM_DRAFTS)):
        state = matcher_state(library, compiled, num_rows)
        times[name] = replay(state, sum(answers, []), num_rows, num_steps, num_drafts)
    return {name: (statistics.median(values), sorted(values)[len(values) // 10]) for name, values in times.items()}


def matcher_state(library: XGrammar, compiled: list[CompiledGrammar], num_rows: int) -> MatcherState:
    state = MatcherState(library, np.zeros(1 + num_rows * (1 + NUM_DRAFTS) * library.num_words, dtype=np.int32))
    state.run(Step(loads=[(one.number, one.data) for one in {one.number: one for one in compiled}.values()]))
    return state


def replay(
    state: MatcherState, answers: list[tuple[int, list[int]]], num_rows: int, num_steps: int, num_drafts: int
) -> list[float]:
    """ms of steps in which each row keeps its drafts; answers: grammar and tokens, gone through again and again."""
    times, source = [], itertools.cycle(answers)
    now: list[list[int]] = [[] for _ in range(num_rows)]
    for _ in range(num_steps):
        step = Step()
        for slot in range(num_rows):
            kept, rest = now[slot][: 1 + num_drafts], now[slot][1 + num_drafts :]
            if rest:
                step.accepts += [(slot, token) for token in kept]
            else:
                number, rest = next(source)
                step.opens.append((slot, number, []))
            step.fills.append((slot, slot * (1 + num_drafts), rest[:num_drafts], 0))
            now[slot] = rest
        times.append(milliseconds(lambda step=step: state.run(step)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
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
            figures = (f"{key} {half:.2f} [{tenth:.2f}]" for key, (half, tenth) in results[name].items())
            print(f"{name:12}", "  ".join(figures), "ms", flush=True)
        server.close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
