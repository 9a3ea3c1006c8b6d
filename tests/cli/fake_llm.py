"""A stand-in for LLM: answers at once, by rule, and keeps what it was asked."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from deepinfer.config.engine import ImageOptions
from deepinfer.errors import RequestError
from deepinfer.frontend.outputs import AnswerDelta, ChatDelta, ChatOutput, RequestOutput
from deepinfer.messages import DraftCounts
from deepinfer.sampling.params import SamplingParams


class FakeTokenizer:
    """One token a character."""

    def encode(self, text):
        return [ord(character) % 128 for character in text]


@dataclass
class FakeLLM:
    """`generate` and `chat` answer with the prompt in capitals; a prompt that holds "refuse" fails.

    completions: token ids that `generate` gives for a prompt of token ids.
    deltas: what `stream_chat` yields: (reasoning, content) pairs; an exception is raised in its place.
    """

    completions: dict = field(default_factory=dict)
    deltas: list = field(default_factory=list)
    default_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    config: object = field(
        default_factory=lambda: SimpleNamespace(
            model=SimpleNamespace(model=None, device="auto", precision="fast"), images=ImageOptions()
        )
    )
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    calls: list = field(default_factory=list)
    device: str = "cpu"
    vocab_size: int = 128
    image_token_id: int | None = None
    max_model_len: int = 1024

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        return None

    def generate(self, prompts, params=None, *, progress=None):
        self.calls.append(("generate", prompts, params))
        return [
            self._answer(RequestOutput, prompt, one)
            for prompt, one in zip(prompts, params_for(prompts, params), strict=True)
        ]

    def stats(self):
        """0.25 s of attention for each call so far, as if every prompt took as long; one draft of two was kept."""
        one = np.array([1])
        drafts = DraftCounts(3 * one, 2 * one, one, num_rows=2, calibration_error=0.25)
        seconds = {"attention": 0.25 * len(self.calls)} if self.calls else {}
        return SimpleNamespace(op_seconds=seconds, drafts=drafts)

    def chat(self, conversations, params=None, *, progress=None, **settings):
        self.calls.append(("chat", conversations, params, settings))
        if settings.get("effort") == "bad":
            raise RequestError("effort is 'bad'; it must be low, high, xhigh or max")
        texts = [messages[-1]["content"] for messages in conversations]
        return [self._answer(ChatOutput, text, one) for text, one in zip(texts, params_for(texts, params), strict=True)]

    def stream_chat(self, messages, params=None, *, thinking=False, effort=None):
        self.calls.append(("stream_chat", messages, params, thinking, effort))
        for place, delta in enumerate(self.deltas):
            if isinstance(delta, BaseException):
                raise delta
            yield ChatDelta(request_id="0", token_ids=[place], answer=AnswerDelta(*delta))

    def score(self, prompt):
        """Logits that give the next token of the sequence the probability 1/2, the rest alike."""
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        logits = np.zeros((len(token_ids), 128), dtype=np.float32)
        logits[np.arange(len(token_ids) - 1), token_ids[1:]] = np.log(127.0)
        return logits

    def _answer(self, kind, prompt, params):
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if isinstance(prompt, list):
            token_ids = list(self.completions.get(tuple(prompt), range(3, 3 + params.max_tokens)))
            return output(kind, token_ids=token_ids, finish_reason="length", first_token_seconds=0.5, total_seconds=2.0)
        if "refuse" in prompt:
            return kind.refused("0", "the prompt is refused")
        return output(kind, text=prompt.upper(), **({"content": prompt.upper()} if kind is ChatOutput else {}))


def output(kind, **values):
    """An answer with the fields that a test does not care about filled in."""
    return kind(
        **{"request_id": "0", "prompt_token_ids": [], "text": "", "token_ids": [], "finish_reason": "stop", **values}
    )


def params_for(prompts, params):
    return params if isinstance(params, list) else [params] * len(prompts)
