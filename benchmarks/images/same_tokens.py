"""Are the tokens after prompts with images the same in every batch and with every chunk size? (float32, golden model)

    PYTHONPATH=src:tests python benchmarks/images/same_tokens.py

32 prompts of one to three images, 8 greedy tokens each; prints one line a case and fails at the first difference.
The tests hold a smaller set.
"""

from __future__ import annotations

import argparse
import time

import goldens
from deepinfer import LLM, SamplingParams
from image_prompts import prompts

NUM_PROMPTS, BATCHES, CHUNKS = 32, (2, 7, 32), (1, 2, 3, 7, 16, 64)
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def tokens(llm: LLM, size: int) -> list[list[int]]:
    """The answers to all prompts, `size` at a time."""
    asked = prompts(NUM_PROMPTS)
    batches = [asked[first : first + size] for first in range(0, NUM_PROMPTS, size)]
    return [output.token_ids for batch in batches for output in llm.generate(batch, PARAMS)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with LLM(goldens.CHECKPOINT, precision="float32") as llm:
        alone = tokens(llm, 1)
        for size in BATCHES:
            assert tokens(llm, size) == alone, f"batches of {size} differ"
            print(f"batches of {size}: {NUM_PROMPTS} of {NUM_PROMPTS} answers as alone", flush=True)
    for chunk in CHUNKS:
        started = time.monotonic()
        with LLM(goldens.CHECKPOINT, precision="float32", max_chunk_tokens=chunk) as llm:
            assert tokens(llm, 8) == alone, f"chunks of {chunk} differ"
        print(f"chunks of {chunk}: {NUM_PROMPTS} of {NUM_PROMPTS} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
