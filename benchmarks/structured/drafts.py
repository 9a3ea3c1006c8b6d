"""Drafts under a grammar: accepted drafts a step and tokens a second, proposals masked by the grammar or not.

    PYTHONPATH=src python benchmarks/structured/drafts.py [--requests 32] [--rounds 3]

Chats with nano under each of FORMS, greedy, all drafts checked; rounds run both ways one after the other.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any
from unittest import mock

from deepinfer import LLM, SamplingParams
from deepinfer.structured.rows import ConstrainedRows

QUESTIONS = ("What is the capital of Armenia?", "What is 36 + 53?", "Who are you?", "Name a colour.")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "is_member": {"type": "boolean"},
    },
    "required": ["name", "age", "colours", "is_member"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "JSON schema": {"json": PERSON},
    "JSON object": {"json_object": True},
    "dates": {"regex": r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9](, [0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]){3}"},
    "capitals": {"regex": r"([A-Z]{3,8} ){4,8}[A-Z]+\."},
    "choice": {"choice": ["The answer is forty-two.", "The answer is not known to anybody here."]},
}


def measure(llm: LLM, params: SamplingParams, num_requests: int, *, is_masked: bool) -> tuple[list[str], float, float]:
    """Texts, accepted drafts a step, tokens a second."""
    chats = [[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}] for number in range(num_requests)]
    with mock.patch.object(ConstrainedRows, "has_any", ConstrainedRows.has_any if is_masked else lambda *_: False):
        outputs = llm.chat(chats, params, progress=False)
    seconds = max(output.total_seconds for output in outputs)
    accepted = sum(output.num_accepted_drafts for output in outputs)
    num_tokens = sum(len(output.token_ids) for output in outputs)
    texts = [output.text for output in outputs]
    return texts, accepted / (num_tokens - len(outputs) - accepted), num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with LLM(draft_scheduling=False, batch_invariant=True) as llm:
        print(f"{'grammar':12} accepted a step: free, masked  tokens/s: free, masked  ratio of rates")
        for name, form in FORMS.items():
            params = SamplingParams(structured_outputs=form, temperature=0.0, max_tokens=64)
            measure(llm, params, options.requests, is_masked=True)
            rounds = [
                [measure(llm, params, options.requests, is_masked=is_masked) for is_masked in (False, True)]
                for _ in range(options.rounds)
            ]
            assert all(free[0] == masked[0] for free, masked in rounds), "masked proposals changed a text"
            free, masked = ([one[way][2] for one in rounds] for way in (0, 1))
            ratio = statistics.median(new / old for old, new in zip(free, masked, strict=True))
            print(
                f"{name:12} {rounds[0][0][1]:20.2f} {rounds[0][1][1]:8.2f} {statistics.median(free):15.0f} "
                f"{statistics.median(masked):9.0f} {ratio:14.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
