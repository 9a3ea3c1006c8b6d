"""Do requests that decode keep their pace while images are encoded? Seconds between their tokens.

    PYTHONPATH=src:tests python benchmarks/images/beside.py [--images 30] [--size 1000]

Four texts are written with the small model, once alone and once while images of `size` x `size` pixels
are prepared, encoded and asked about, one after the other; beside it, while texts of as many tokens are read, as an
image's positions too are computed in one step. The encoder's own time stands there as well: a step that waited for an
image would be longer by as much.
"""

from __future__ import annotations

import argparse
import threading
import time

import numpy as np

from deepinfer import LLM, SamplingParams
from images.pictures import picture

NUM_TEXTS = 4
TEXT = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
QUESTION = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def write(llm: LLM, gaps: list[float], seed: int) -> None:
    last = None
    for delta in llm.stream([0, 40 + seed, 50 + seed], TEXT):
        now = time.perf_counter()
        if delta.token_ids and last is not None:
            gaps.append(now - last)
        last = now


def asked(image: object) -> dict[str, object]:
    return {"prompt_token_ids": [0, 4095, 7], "images": [image]}


def measure(llm: LLM, prompts: list[dict[str, object]]) -> str:
    gaps: list[float] = []
    before = llm.stats()
    writers = [threading.Thread(target=write, args=(llm, gaps, seed)) for seed in range(NUM_TEXTS)]
    for writer in writers:
        writer.start()
    for prompt in prompts:
        if any(writer.is_alive() for writer in writers):
            llm.generate(prompt, QUESTION)
    for writer in writers:
        writer.join()
    after = llm.stats()
    middle, high = np.percentile(gaps, [50, 99])
    count = after.num_encoded_images - before.num_encoded_images
    text = f"gaps: median {1e3 * middle:.1f} ms, 99 % {1e3 * high:.1f} ms, longest {1e3 * max(gaps):.1f} ms"
    if count:
        text += (
            f"; {count} images, {1e3 * (after.encode_seconds - before.encode_seconds) / count:.0f} ms each to encode"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=30)
    parser.add_argument("--size", type=int, default=1000)
    args = parser.parse_args()
    images = [asked(picture(args.size, args.size, seed)) for seed in range(args.images)]
    with LLM(device="cpu", num_threads=1) as llm:
        measure(llm, [])  # warm
        print("alone:      ", measure(llm, []))
        num_tokens = len(llm.generate(images.pop(), QUESTION)[0].prompt_token_ids)
        texts = [{"prompt_token_ids": [0, *range(seed, seed + num_tokens - 1)]} for seed in range(args.images)]
        print("with texts: ", measure(llm, texts), f"({num_tokens} tokens each)")
        print("with images:", measure(llm, images))
        print("small ones: ", measure(llm, [asked(picture(126, 126, seed)) for seed in range(args.images)]))


if __name__ == "__main__":
    main()
