"""Do requests that decode keep their pace while images are encoded? Milliseconds between their tokens.

    PYTHONPATH=src:tests python benchmarks/images/beside.py [--images 12] [--size 1000] [--rounds 5] [--tokens 400]

Four texts are written with the small model: alone; while texts are read, one after the other, as long as an image of
`size` x `size` pixels has positions, since those are computed in one step too; while such images are prepared, encoded
and asked about; and while small ones are. All of it in every round; printed are the median round and the range.
A step that waited for an image would be longer by what the image takes to encode.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import numpy as np

from deepinfer import LLM, SamplingParams
from images.pictures import picture

NUM_TEXTS = 4
QUESTION = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


Prompt = dict[str, object]
Gaps = tuple[float, float, float]


def write(llm: LLM, gaps: list[float], seed: int, max_tokens: int) -> None:
    last = None
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for delta in llm.stream([0, 40 + seed, 50 + seed], params):
        now = time.perf_counter()
        if delta.token_ids and last is not None:
            gaps.append(now - last)
        last = now


def asked(image: object) -> Prompt:
    return {"prompt_token_ids": [0, 4095, 7], "images": [image]}


def measure(llm: LLM, prompts: list[Prompt], max_tokens: int) -> Gaps:
    """Milliseconds between tokens while these prompts are asked one after the other: median, 99th of 100, longest."""
    gaps: list[float] = []
    writers = [threading.Thread(target=write, args=(llm, gaps, seed, max_tokens)) for seed in range(NUM_TEXTS)]
    for writer in writers:
        writer.start()
    for prompt in prompts:
        if any(writer.is_alive() for writer in writers):
            llm.generate(prompt, QUESTION)
    for writer in writers:
        writer.join()
    middle, high = np.percentile(gaps, [50, 99])
    return 1e3 * middle, 1e3 * high, 1e3 * max(gaps)


def shown(rounds: list[Gaps]) -> str:
    """The median round of each, and the range."""
    columns = zip(("median", "99 %", "longest"), zip(*rounds, strict=True), strict=True)
    return ", ".join(
        f"{name} {statistics.median(values):.1f} ms ({min(values):.1f}-{max(values):.1f})" for name, values in columns
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of each text")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with LLM(device=args.device, num_threads=1) as llm:
        (sample,) = llm.generate(asked(picture(args.size, args.size, seed=10**6)), QUESTION)
        num_tokens = len(sample.prompt_token_ids)
        measure(llm, [], args.tokens)  # warm
        found: dict[str, list[Gaps]] = {}
        seconds: dict[str, list[float]] = {}
        for number in range(args.rounds):
            seeds = range(number * args.images, (number + 1) * args.images)
            cases: dict[str, list[Prompt]] = {
                "alone": [],
                f"texts of {num_tokens} tokens": [
                    {"prompt_token_ids": [0, *range(seed, seed + num_tokens - 1)]} for seed in seeds
                ],
                f"images of {num_tokens} positions": [asked(picture(args.size, args.size, seed)) for seed in seeds],
                "images of 126 x 126": [asked(picture(126, 126, seed)) for seed in seeds],
            }
            for name, prompts in cases.items():
                before = llm.stats()
                found.setdefault(name, []).append(measure(llm, prompts, args.tokens))
                after = llm.stats()
                if count := after.num_encoded_images - before.num_encoded_images:
                    seconds.setdefault(name, []).append((after.encode_seconds - before.encode_seconds) / count)
        for name, rounds in found.items():
            took = f"; {1e3 * statistics.median(seconds[name]):.0f} ms to encode one" if name in seconds else ""
            print(f"{name:24} {shown(rounds)}{took}")


if __name__ == "__main__":
    main()
